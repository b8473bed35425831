"""The headrace server: gateways, data plane, repository, schedulers, instances."""

__version__ = "0.1.0"
