"""Backend processes run on the processors that their instance groups' policies name, also when they are started again."""

from __future__ import annotations

import os

import pytest

from clients import call, infer
from harness import RunningServer, running
from repositories import add_identity

TENSOR = ("INPUT0", "FP32", [1, 1], [1])
MINE = sorted(os.sched_getaffinity(0))


def cores(server: RunningServer) -> list[list[int]]:
    """Return the processors of each backend process; every thread of one has the same."""
    found = []
    for process in server.backends():
        threads = {tuple(sorted(os.sched_getaffinity(thread.id))) for thread in process.threads()}
        assert len(threads) == 1, threads
        found.append(list(threads.pop()))
    return sorted(found, key=lambda listed: (len(listed), listed))


@pytest.mark.skipif(len(MINE) < 2, reason="there is one processor")
def test_groups_run_where_their_policies_say(tmp_path):
    groups = [
        "{ name: 'one' count: 1 kind: KIND_CPU host_policy: 'last' }",
        "{ name: 'all' count: 1 kind: KIND_CPU }",
        "{ name: 'odd' count: 1 kind: KIND_CPU host_policy: 'unknown' }",
    ]
    add_identity(tmp_path, "m", extra=f"instance_group [ {', '.join(groups)} ]")
    with running(tmp_path, f"--host-policy=last,cpu-cores={MINE[-1]}") as server:
        assert cores(server) == [[MINE[-1]], MINE, MINE]
        server.wait_for_log("there is no --host-policy unknown")
        assert infer(server, "m", TENSOR)[0] == 200


def test_instances_without_a_policy_of_their_own_have_that_of_their_kind(tmp_path):
    add_identity(tmp_path, "m")
    with running(tmp_path, f"--host-policy=cpu,cpu-cores={MINE[0]}") as server:
        assert cores(server) == [MINE[:1]]
        assert infer(server, "m", TENSOR, parameters={"crash": True})[0] == 503
        server.wait_status("/v2/models/m/ready", 200)
        assert cores(server) == [MINE[:1]], "the process that took its place too"


def test_groups_that_are_all_passive_are_refused(tmp_path):
    add_identity(tmp_path, "m", extra="instance_group [ { count: 1 passive: true } ]")
    with running(tmp_path, "--model-control-mode=explicit") as server:
        status, body = call(server, "/v2/repository/models/m/load", {})
        assert status == 400
        assert "instance_group: every group is passive" in body["error"]
