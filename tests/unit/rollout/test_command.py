"""The words of `headrace rollout` become one call, and a status becomes lines."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.cli import main
from headrace.rollout.command import render

STATUS = {
    "model": "m",
    "policy": {"default": 2, "weights": {"3": 10.0}, "guard": {"max_error_rate": 0.1}},
    "default": 2,
    "versions": [
        {"version": 2, "ready": True, "weight": 90.0, "answered": 9, "failed": 0},
        {"version": 3, "ready": False, "weight": 10.0, "answered": 0, "failed": 1},
    ],
    "set_by": "call",
    "shadow_in_flight": 1,
    "shadows": {"4": {"ok": 3, "error": 0}},
    "rollbacks": [{"version": 5, "reason": "p99", "text": "slow\x1b[2J", "at": "2026-01-01T00:00:00Z"}],
}


@pytest.fixture
def server():
    """A server that notes what it is asked, and answers with a status, or with the refusal that it is given."""
    asked: list[tuple] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: object) -> None:
            asked.append((self.command, self.path, body, self.headers.get("Authorization")))
            refusal = httpd.refusal
            text = json.dumps({"error": refusal} if refusal else STATUS).encode()
            self.send_response(400 if refusal else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    httpd.refusal, httpd.asked = "", asked
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def run(server, *words: str) -> int:
    return main(["rollout", f"http://127.0.0.1:{server.server_port}", "m", *words])


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["promote", "3"], {"promote": 3}),
        (["default", "3"], {"default": 3}),
        (["rollback"], {"rollback": True}),
        (["rollback", "3"], {"rollback": 3}),
        (["reset"], {"reset": True}),
        (["shadow", "off"], {"shadow": None}),
        (["shadow", "3"], {"shadow": {"version": "3", "percent": 100.0}}),
        (
            ["shadow", "3", "--percent", "20", "--max-in-flight", "2", "--streams"],
            {"shadow": {"version": "3", "percent": 20.0, "max_in_flight": 2, "streams": True}},
        ),
        (["switch", "3", "--load", "--unload-old"], {"switch": {"version": 3, "load": True, "unload_old": True}}),
        (["canary", "4", "--weight", "5"], {"weights": {"3": 10.0, "4": 5.0}}),
        (["canary", "3", "--weight", "0"], {"weights": {"3": 0.0}}),
        (
            ["canary", "3", "--weight", "20", "--max-p99-ms", "9", "--window-secs", "5", "--sticky-parameter", "u"],
            {
                "weights": {"3": 20.0},
                "sticky_parameter": "u",
                "guard": {"max_error_rate": 0.1, "max_p99_ms": 9.0, "window_secs": 5},
            },
        ),
    ],
)
def test_words_become_a_call(server, words, body):
    assert run(server, *words) == 0
    assert server.asked[-1][:3] == ("POST", "/v2/models/m/traffic", body)


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_one_version_is_loaded_and_unloaded(server, verb):
    assert run(server, verb, "3") == 0
    assert server.asked[0][:3] == ("POST", f"/v2/repository/models/m/{verb}", {"parameters": {"version": 3}})
    assert server.asked[1][:2] == ("GET", "/v2/models/m/traffic")


def test_without_a_command_it_tells_the_status_with_the_key_of_the_file(server, tmp_path, capsys):
    (tmp_path / "key").write_text("secret\n")
    words = ["rollout", "--key-file", str(tmp_path / "key"), f"http://127.0.0.1:{server.server_port}", "m"]
    assert main(words) == 0
    assert server.asked == [("GET", "/v2/models/m/traffic", None, "Bearer secret")]
    assert "version 3: 10 % of the requests, NOT READY, 0 answered, 1 failed" in capsys.readouterr().out


def test_a_status_becomes_lines_without_control_characters():
    lines = render(STATUS).splitlines()
    assert lines[0] == "model m, default version 2, policy set by call"
    assert "  shadow 4: 3 ok, 0 error, 1 under way" in lines
    assert "  guard: max_error_rate 0.1" in lines
    assert lines[-1].startswith("  2026-01-01T00:00:00Z version 5 rolled back (p99): slow")
    assert "\x1b" not in lines[-1]


def test_a_refusal_is_told_in_the_server_s_words(server, capsys):
    server.refusal = "version 9 is not there"
    assert run(server, "promote", "9") == 1
    assert capsys.readouterr().err == "the server says: version 9 is not there (HTTP 400)\n"


@pytest.mark.parametrize(
    "words",
    [
        ["rollout"],
        ["rollout", "http://127.0.0.1:9", "m"],
        ["rollout", "ftp://x", "m"],
        ["rollout", "http://x:y", "m"],
        ["rollout", "http://127.0.0.1:9", "m", "canary", "3"],
        ["rollout", "http://127.0.0.1:9", "m", "promote"],
        ["rollout", "http://127.0.0.1:9", "m", "dance"],
        ["rollout", "--key-file", "/nonexistent", "http://127.0.0.1:9", "m"],
    ],
)
def test_mistakes_end_with_status_1(words, capsys):
    assert main(words) == 1
    assert capsys.readouterr().err
