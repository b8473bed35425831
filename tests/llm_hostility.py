"""Hostile requests for language models, at every door, the same for the same seed; and what a server must be after each.

python tests/bench/llm_fuzz.py --requests 5000        # the long way; tests/chaos/test_llm_fuzz.py is the short one
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import httpx

from harness import RunningServer
from headrace_protocol._generated import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/embeddings": {"input": ["hello"]},
    "/v1/rerank": {"query": "hello", "documents": ["hell", "low"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v2/models/tiny/generate": {"text_input": "hello", "parameters": {"max_tokens": 4}},
    "/v2/models/tiny/generate_stream": {"text_input": "hello", "parameters": {"max_tokens": 4}},
    "/v2/models/tiny/infer": {
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]},
            {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": ['{"max_tokens": 4}']},
        ]
    },
}
SCHEMAS: tuple[Any, ...] = (
    {"type": "nope"}, {"properties": {"a": "bar"}}, {"$ref": "#"}, {"$ref": "http://x/y"}, {}, [], 3, {"enum": []}, {"maximum": 2 * 10**10, "type": "integer"},
    {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "pattern": "foo**"}, {"not": {}}, {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"type": "array", "minItems": 10**9}, {"type": "object", "required": ["x"] * 1000}, {"type": "string", "minLength": 10**12}, {"const": float("inf")},
)  # fmt: skip
PATTERNS = (
    "foo**",
    "(a+)+$",
    "(",
    "[z-a]",
    "a{1000000}",
    "(?<=x)y",
    "\\1",
    "",
    "(a|b){500}{500}",
    "\ud800",
    ".*" * 500,
)
MEMBERS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 2, -1, 3, 1e308, "hot"), "top_p": (0, 1, 1.5, -0.1), "top_k": (-1, 0, 10**9, -2, 1.5), "min_p": (2, -1, 0.5),
    "n": (0, 2, 3, 10**6, -1, True), "best_of": (2, 10**6, 0), "seed": (2**63, -(2**63), 2**64, 1.5, -1), "max_tokens": (0, -1, 1, 2**31, 2**63, None, "4"),
    "max_completion_tokens": (0, 3, 2**40), "min_tokens": (10**9, -1, 3), "stop": (["x"] * 1000, "", [""], "x" * 100_000, [None], ["\0", "é"], 5),
    "stop_token_ids": ([-1], [2**31], [2**70], ["a"], [0] * 5000), "logit_bias": ({"-1": 1}, {"99999999": 1}, {"1": 1e9}, {"x": 1}, {str(at): 1 for at in range(5000)}, []),
    "logprobs": (True, 0, 5, 21, -1, 10**9), "top_logprobs": (0, 20, 21, -1), "prompt_logprobs": (-1, 0, 10**9), "echo": (True, "yes"), "stream": (True, "true", 1),
    "stream_options": ({"include_usage": True}, {"x": 1}, [], None), "presence_penalty": (2, 3, -3), "frequency_penalty": (2, "a"), "repetition_penalty": (0, -1, 1e30, 2),
    "bad_words": (["x"] * 10_000, [""], "x"), "allowed_token_ids": ([], [-1], [10**9], [1]), "ignore_eos": (True, 3), "truncate_prompt_tokens": (-1, 0, 1, 10**9),
    "response_format": tuple({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS) + ({"type": "x"}, {"type": "json_object"}, 1),
    "structured_outputs": tuple({"regex": each} for each in PATTERNS) + ({"choice": []}, {"choice": [1]}, {"choice": ["a"] * 20_000}, {"grammar": "start: start"}, {"regex": "a", "choice": ["a"]}),
    "tools": ([], [{}], [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}], [{"type": "function", "function": {"name": "f" * 1000}}], [{"type": "function", "function": {"name": "f"}}] * 500),
    "tool_choice": ("required", "auto", "none", {"type": "function", "function": {"name": "g"}}, {}, 4), "chat_template": ("{{ 1/0 }}", "{% for x in range(10**9) %}{% endfor %}"),
    "chat_template_kwargs": ({"messages": 1}, {"x": [1] * 1000}, 4), "priority": (2**70, -1, "high"), "cache_salt": ("", "a/b", "x" * 100_000, 5), "user": (5, "x" * 10_000),
    "model": ("nobody", "", None, 5, "tiny", "../tiny", "x" * 10_000), "lora": ("x",), "use_beam_search": (True,), "beam_width": (4, 10**6, -1), "length_penalty": (1e308, "x"),
    "prompt": ("", [], [[]], [-1], [2**31], [2**70], [[1], "a"], ["a"] * 5000, [1.5], "\0", "x" * 100_000, None, {"a": 1}, [[0, 511]]),
    "messages": ([], [{}], [{"role": "x", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], [{"role": "user"}] * 3000, "hi", [{"role": "tool", "content": "x"}], [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]),
    "input": ([], [""], [[-1]], [[2**40]], 5, ["a"] * 5000, "x" * 100_000), "dimensions": (0, -1, 10**9, 2), "encoding_format": ("base64", "x"), "documents": ([], [""], ["a"] * 5000, 4),
    "query": ("", 5), "tokens": ([], [-1], [10**9], [2**70], "a", [[1]]), "text_input": ("", 5, None, "x" * 100_000), "parameters": ({"max_tokens": -1}, {"sampling_parameters": "{"}, [], {"temperature": {"a": 1}}),
    "generation_call": ("{", "[]", '{"prompts": []}', '{"prompts": [[-5]]}', '{"task": "x", "prompts": ["a"]}', '{"prompts": ["a"], "sampling": {"n": 1e9}}', '{"prompts":' + "[" * 5000),
    "inputs": ([], [{}], [{"name": "text_input", "datatype": "FP32", "shape": [1], "data": [1]}], [{"name": "text_input", "datatype": "BYTES", "shape": [-1], "data": []}]),
    "thinking_token_budget": (0, -1, 10**9), "repetition_detection": ({"max_pattern_size": -1}, {"max_pattern_size": 10**9, "min_count": 2}), "max_output_tokens": (0, 2**50), "suffix": ("x",),
}  # fmt: skip
"""Of each member values that are wrong, very large, or right but rare; each may go into any request."""
LEAVES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    -(2**70),
    1e308,
    "",
    "x",
    "é\0",
    "\U0001f389",
    [],
    {},
    [[[]]],
    {"a": {"b": 1}},
)
FINE = frozenset({200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431, 501, 503})
GRPC_FINE = frozenset(
    {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"}
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Hostility:
    """Asks one server's model `tiny`, request by request, and checks it after each."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []
        self.client = httpx.Client(base_url=f"http://{server.http}", timeout=60)
        self.channel = grpc.insecure_channel(server.grpc)
        self.unary = self.channel.unary_unary(
            SERVICE + "ModelInfer", lambda each: each.SerializeToString(), pb.ModelInferResponse.FromString
        )
        self.stream = self.channel.stream_stream(
            SERVICE + "ModelStreamInfer", lambda each: each.SerializeToString(), pb.ModelStreamInferResponse.FromString
        )
        self.goods = [self.chat, self.completion, self.generate]
        self.expected = [good() for good in self.goods]
        self.ways: list[Callable[[], None]] = [
            *[self.json] * 12, self.bytes, self.bytes, self.half, self.leave, self.slow, self.grpc, self.grpc, self.grpc_stream,
        ]  # fmt: skip

    def close(self) -> None:
        self.client.close()
        self.channel.close()

    def run(self, count: int) -> None:
        for number in range(count):
            way = self.random.choice(self.ways)
            self.last = ""
            try:
                way()
                which = number % len(self.goods)
                got = self.goods[which]()
            except httpx.HTTPError as error:
                self.faults.append(f"{number} {way.__name__}: {error!r} after {self.last[:2000]}")
                continue
            if got != self.expected[which]:
                self.faults.append(f"{number} {way.__name__}: a good request got {got} after {self.last[:2000]}")

    # --- a good request at each of three doors ---

    def chat(self) -> Any:
        body = {"messages": [{"role": "user", "content": "well?"}], "seed": 3, "logprobs": True}
        answer = self.good("/v1/chat/completions", {"model": "tiny", "max_tokens": 3, **body}, "choices")
        with contextlib.suppress(KeyError, TypeError, IndexError):  # no answer
            for entry in answer[0]["logprobs"]["content"]:  # in company sums are rounded otherwise
                entry["logprob"] = round(entry["logprob"], 3)
        return answer

    def completion(self) -> Any:
        return self.good(
            "/v1/completions", {"model": "tiny", "prompt": "well", "max_tokens": 3, "temperature": 0}, "choices"
        )

    def generate(self) -> Any:
        asked = {"text_input": "well", "parameters": {"max_tokens": 3, "temperature": 0}}
        return self.good("/v2/models/tiny/generate", asked, "text_output")

    def good(self, path: str, body: Any, member: str) -> Any:
        answer = self.client.post(path, json=body)
        return answer.json()[member] if answer.status_code == 200 else (answer.status_code, answer.text[:500])

    # --- hostile ones ---

    def body(self) -> tuple[str, Any]:
        path = self.random.choice(list(PATHS))
        body = copy.deepcopy(PATHS[path])
        if path.startswith(("/v1", "/tok", "/detok")):
            body["model"] = "tiny"
        for _ in range(self.random.choice((1, 1, 2, 3, 6))):
            name = self.random.choice(list(MEMBERS))
            value = self.random.choice(MEMBERS[name] if self.random.random() < 0.7 else LEAVES)
            place = body
            if path.startswith("/v2") and self.random.random() < 0.6 and isinstance(body.get("parameters", {}), dict):
                place = body.setdefault("parameters", {})
            place[name] = value
        if self.random.random() < 0.05:
            body[self.random.choice(list(MEMBERS))] = nested(self.random.choice((60, 200, 900)))
        if path.endswith("/infer") and self.random.random() < 0.7:
            body["inputs"] = self.tensors()
        return path, body

    def tensors(self) -> list[Any]:
        name = self.random.choice(
            ("text_input", "sampling_parameters", "stream", "generation_call", "embedding_request")
        )
        kind = self.random.choice(("BYTES", "BYTES", "BOOL", "FP32", "X"))
        value: Any = self.random.choice((*MEMBERS["generation_call"], *LEAVES))
        if name == "sampling_parameters":
            member = self.random.choice(list(MEMBERS))
            value = json.dumps({member: self.random.choice(MEMBERS[member])})
        shape = self.random.choice(([1], [1], [0], [2], [1, 1], [-1], []))
        first = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
        return [first, {"name": name, "datatype": kind, "shape": shape, "data": [value]}][self.random.randrange(2) :]

    def json(self) -> None:
        path, body = self.body()
        self.post(path, json.dumps(body).encode())

    def bytes(self) -> None:
        """Send JSON of which some bytes are others, or are missing."""
        path, body = self.body()
        content = bytearray(json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")[:20_000])
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(content))
            junk = self.random.choice(
                (b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"{", b"]", b'"', b"NaN", b"1e999", b"[" * 50_000)
            )
            content[at : at + self.random.choice((0, 1, 5))] = junk
        self.post(path, bytes(content))

    def post(self, path: str, content: bytes) -> None:
        self.last = f"POST {path} {content[:1500]!r}"
        answer = self.client.post(path, content=content, headers={"Content-Type": "application/json"})
        self.seen[f"HTTP {answer.status_code}"] += 1
        if answer.status_code not in FINE:
            self.faults.append(f"{answer.status_code} {answer.text[:500]} to {self.last}")
        elif answer.status_code == 200 and '"error"' in answer.text and "stream" in path:
            self.seen["error events"] += 1

    def raw(self, path: str, content: bytes, length: int | None = None) -> socket.socket:
        host, port = self.server.http.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), 10)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length or len(content)}\r\n\r\n"
        self.last = f"raw {path} {content[:500]!r}"
        with contextlib.suppress(ConnectionError):
            connection.sendall(head.encode() + content)
        return connection

    def half(self) -> None:
        """Send half of a body, and go."""
        path, body = self.body()
        content = json.dumps(body).encode()[:20_000]
        with self.raw(path, content[: len(content) // 2], len(content)):
            self.seen["half sent"] += 1

    def long_stream(self) -> socket.socket:
        body = {"model": "tiny", "prompt": "go", "stream": True, "max_tokens": 100, "ignore_eos": True}
        return self.raw("/v1/completions", json.dumps(body).encode())

    def leave(self) -> None:
        """Go while an answer is made, or after its first bytes."""
        with self.long_stream() as connection:
            if self.random.random() < 0.5:
                connection.recv(64)
            if self.random.random() < 0.5:  # as the end of a process does
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.seen["left"] += 1

    def slow(self) -> None:
        """Read a few bytes at a time, while a good request is answered."""
        with self.long_stream() as connection:
            for _ in range(3):
                connection.recv(7)
                self.completion()
            self.seen["slow readers"] += 1

    def infer_request(self) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name="tiny", id=self.random.choice(("", "x", "y" * 5000)))
        typed = self.random.random() < 0.4
        for each in self.tensors():
            tensor = request.inputs.add(name=str(each["name"]), datatype=each["datatype"])
            tensor.shape.extend(each["shape"])
            if typed ^ (self.random.random() < 0.05):
                tensor.contents.bytes_contents.append(str(each["data"][0]).encode())
            else:
                text = str(each["data"][0]).encode()
                length = self.random.choice((*[len(text)] * 9, 2**31, 0)).to_bytes(4, "little")
                request.raw_input_contents.append(length + text)
        name = self.random.choice(list(MEMBERS))
        value = self.random.choice(MEMBERS[name])
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int) and abs(value) < 2**63:
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = str(value)[:5000].encode(errors="replace").decode()
        self.last = f"gRPC {str(request)[:1500]}"
        return request

    def told(self, code: str, details: str) -> None:
        self.seen[f"gRPC {code}"] += 1
        if code not in GRPC_FINE:
            self.faults.append(f"gRPC {code} {details[:300]} to {self.last}")

    def grpc(self) -> None:
        try:
            self.unary(self.infer_request(), timeout=60)
            self.told("OK", "")
        except grpc.RpcError as error:
            self.told(error.code().name, error.details())

    def grpc_stream(self) -> None:
        """Send some requests on a stream; now and then leave it at the first response."""
        call = self.stream(iter([self.infer_request() for _ in range(self.random.randint(1, 4))]), timeout=60)
        stay = self.random.random() < 0.7
        try:
            for response in call:
                self.seen["gRPC responses with an error" if response.error_message else "gRPC responses"] += 1
                if not stay:
                    call.cancel()
                    break
            if stay:
                self.told("OK", "")
        except grpc.RpcError as error:
            if stay:
                self.told(error.code().name, error.details())
