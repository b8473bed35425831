"""What the README says to type: each command and each program, against a server over the sample models."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import running

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [command.replace("\\\n", " ") for command in re.findall(r"^    (curl (?:.*\\\n)*.*)$", README, re.MULTILINE)]
EXPECTED = {
    "digits/infer": '{"model_name":"digits","model_version":"1","outputs":[{"name":"scores","datatype":"BYTES",'
    '"shape":[1,1],"data":["0.978054:7:seven"]}]}',
    "simple/generate": '"OUTPUT0":[2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]',
    "repeat/generate_stream": re.search(r"^```\n(data: .*?)```", README, re.MULTILINE | re.DOTALL)[1],
}


@pytest.fixture(scope="module")
def server():
    with running(ROOT / "model_repository", "--allow-client-shm=true") as running_server:
        yield running_server


def here(text, server):
    """Return a text of the README with the ports of this server."""
    return text.replace("localhost:8000", server.http).replace("localhost:8001", server.grpc)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_readme_shows(server, command):
    if not shutil.which("curl"):
        pytest.skip("there is no curl here")

    argv = shlex.split(here(command, server))
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)

    (expected,) = (text for path, text in EXPECTED.items() if f"/{path} " in command)
    assert expected in result.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_runs_and_prints_something(server, program):
    argv = [sys.executable, "-W", "error", "-c", here(program, server)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode == 0, result.stderr
    assert result.stdout
