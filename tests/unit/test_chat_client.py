"""`headrace chat`, against a small server that plays answers as the OpenAI door streams them."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.cli import main
from headrace.client.conversation import Conversation, Reply
from headrace_protocol.errors import InferError


def event(**delta):
    finish = delta.pop("finish", None)
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


ANSWER = [
    event(role="assistant", content=""),
    event(reasoning_content="hm"),
    event(content="Hel"),
    event(content="lo"),
    event(finish="stop"),
    {"choices": [], "usage": {"completion_tokens": 7}},
]


class Door:
    """Answers with the status and body, or the events, that a test sets."""

    def __init__(self):
        self.asked, self.keys, self.models = [], [], ["smol"]
        self.events, self.refusal, self.done = ANSWER, None, True
        self.gone = threading.Event()

    def handler(self):
        door = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.reply(200, {"object": "list", "data": [{"id": name} for name in door.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                door.asked.append(body)
                door.keys.append(self.headers.get("Authorization"))
                if door.refusal is not None:
                    self.reply(*door.refusal)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    for each in door.events:
                        self.wfile.write(b": ping\n\ndata: %b\n\n" % json.dumps(each).encode())
                        self.wfile.flush()
                    if door.done:
                        self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    door.gone.set()

            def reply(self, status, document):
                data = json.dumps(document).encode() if isinstance(document, dict) else document
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler


@pytest.fixture
def door():
    door = Door()
    server = ThreadingHTTPServer(("127.0.0.1", 0), door.handler())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    door.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield door
    server.shutdown()
    thread.join()
    server.server_close()


def piped(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def conversation(door, **options):
    return Conversation(door.url, None, system=None, options=options, timeout=10)


def test_one_message_is_answered_and_the_only_model_is_found(door, capsys):
    assert main(["chat", door.url, "-m", "Hi", "--temperature", "0", "--seed", "3", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "hmHello\n"
    assert door.asked == [
        {
            "model": "smol",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "seed": 3,
        }
    ]


def test_what_is_piped_in_is_the_question(door, monkeypatch, capsys):
    piped(monkeypatch, "one\ntwo\n")
    assert main(["chat", door.url, "other", "--stats"]) == 0
    assert door.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo\n"}]
    assert door.asked[0]["model"] == "other"
    assert capsys.readouterr().err.startswith("7 tokens")


def test_a_conversation_remembers_and_begins_anew(door, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("one\ntwo\n/new\nthree\n/quit\nnever\n"))
    assert main(["chat", door.url]) == 0
    said = [[message["content"] for message in asked["messages"]] for asked in door.asked]
    assert said == [["one"], ["one", "Hello", "two"], ["three"]]
    assert "smol" in capsys.readouterr().err


def test_a_failure_of_one_question_does_not_end_the_conversation(door, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("one\n"))
    door.refusal = 400, {"error": {"message": "too long\x1b[2J", "type": "invalid_request_error"}}
    assert main(["chat", door.url]) == 0
    assert r"too long\x1b[2J (HTTP 400)" in capsys.readouterr().err


def test_text_cannot_steer_the_terminal(door, capsys):
    door.events = [event(content="a\x1b]0;owned\x07\tb\r\nc"), event(finish="stop")]
    assert main(["chat", door.url, "-m", "Hi"]) == 0
    assert capsys.readouterr().out == "a\\x1b]0;owned\\x07\tb\nc\n"


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        ((404, {"error": {"message": "no model 'x'"}}), "the server says: no model 'x' (HTTP 404)"),
        ((503, {"error": "starting"}), "the server says: starting (HTTP 503)"),
        ((502, b"<html>bad gateway"), "the server says: <html>bad gateway (HTTP 502)"),
        ((500, b""), "the server says: no explanation (HTTP 500)"),
    ],
)
def test_the_servers_words_are_told(door, capsys, refusal, sentence):
    door.refusal = refusal
    assert main(["chat", door.url, "-m", "Hi"]) == 1
    assert capsys.readouterr().err.strip() == sentence


def test_an_error_within_the_stream_is_told(door, capsys):
    door.events = [event(content="Hel"), {"error": {"message": "the engine broke"}}]
    assert main(["chat", door.url, "-m", "Hi"]) == 1
    assert "the engine broke" in capsys.readouterr().err


def test_an_answer_that_just_ends_is_a_failure(door, capsys):
    door.events, door.done = [event(content="Hel")], False
    assert main(["chat", door.url, "-m", "Hi"]) == 1
    assert "before its end" in capsys.readouterr().err


def test_a_failed_question_is_forgotten_and_a_stopped_answer_kept(door):
    talk = conversation(door)
    door.refusal = 500, b""
    with pytest.raises(InferError):
        list(talk.ask("one", Reply()))
    assert talk.messages == []
    door.refusal = None
    pieces = talk.ask("two", Reply())
    assert [next(pieces).text, next(pieces).text] == ["hm", "Hel"]
    pieces.close()
    assert talk.messages == [{"role": "user", "content": "two"}, {"role": "assistant", "content": "Hel"}]


def test_an_ended_answer_closes_its_connection(door):
    door.events = [event(content="x" * 1000)] * 100_000
    pieces = conversation(door).ask("one", Reply())
    next(pieces)
    pieces.close()
    assert door.gone.wait(10), "the server was still read from"


def test_the_key_of_the_environment_goes_along(door, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert main(["chat", door.url, "-m", "Hi"]) == 0
    assert door.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ftp://somewhere"], "expected http://host:port, got 'ftp://somewhere'"),
        (["http://localhost:99999"], "Port out of range"),
        (["http://127.0.0.1:9", "-m", "x"], "no answer from http://127.0.0.1:9"),
    ],
)
def test_a_wrong_address_is_named(words, sentence, capsys):
    assert main(["chat", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_several_models_want_a_name(door, capsys):
    door.models = ["a", "b"]
    assert main(["chat", door.url, "-m", "Hi"]) == 1
    assert "name a model: the server has a, b" in capsys.readouterr().err


def test_help_and_mistakes(capsys):
    assert main(["chat", "--help"]) == 0
    assert "OPENAI_API_KEY" in capsys.readouterr().out
    assert main(["chat"]) == 1
    assert "url" in capsys.readouterr().err
