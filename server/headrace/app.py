"""The composition root: builds every object of a server, owns their lifetimes, and stops them in order.

Ports open first, so that probes are answered while models load. On SIGTERM readiness goes off, what runs is finished
within the exit timeout, then models are unloaded; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator

import uvloop

from headrace import __version__
from headrace.clock import SystemClock
from headrace.config import ServerConfig
from headrace.controlplane import RegistryControlPlane
from headrace.dataplane import EXTENSIONS, RegistryDataPlane
from headrace.gateway.grpc.service import GrpcGateway
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.http.app import HttpGateway, HttpSettings
from headrace.instances.loader import InstanceLoader
from headrace.instances.served_model import ServedModel
from headrace.instances.supervisor import ProcessSettings
from headrace.observability import logging as log_setup
from headrace.observability.metrics import MetricsServer, ModelMetrics
from headrace.observability.tables import models_table
from headrace.repository.registry import ModelRegistry
from headrace.repository.watcher import RepositoryWatcher
from headrace.types import ServerMetadata
from headrace_protocol.errors import InferError

_log = logging.getLogger("headrace")


def serve(config: ServerConfig) -> int:
    """Run a server until it is told to stop; return the process's exit status."""
    return uvloop.run(Server(config).run())
