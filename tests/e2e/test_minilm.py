"""A real model of sentences behind an ensemble: text goes in, a tokenizer in Python and a network make a vector of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from clients import DOORS, ask, call
from figures import figures
from harness import RunningServer, running
from minilm import FORMS, add_embedder, known_vectors, write_encoders

CLIENTS = 16
DELAY_US = 200_000


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, encoders: dict[str, Path]) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_embedder(repository, encoders, delay_us=DELAY_US)
    with running(repository) as started:
        yield started


def texts(*rows: str) -> dict[str, np.ndarray]:
    return {"TEXT": np.array([[row.encode()] for row in rows], np.object_)}


def are_alike(got: np.ndarray, expected: np.ndarray) -> bool:
    """Whether both have the length 1 and, almost, the same direction."""
    lengths = np.linalg.norm(got, axis=-1)
    return bool(np.allclose(lengths, 1, atol=1e-5) and np.all(np.sum(got * expected, -1) > 0.9999))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", FORMS)
def test_each_text_becomes_the_vector_that_the_package_itself_makes_of_it(
    server: RunningServer, form: str, door: str
) -> None:
    for text, vector in known_vectors().items():
        got = ask(server, door, f"minilm_{form}", texts(text))["EMBEDDING"]
        assert got.shape == (1, 384)
        assert are_alike(got, vector), text[:40]


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_one_request_each_become_their_own_vector(server: RunningServer, form: str) -> None:
    known = known_vectors()
    got = ask(server, "grpc", f"minilm_{form}", texts(*known))["EMBEDDING"]
    assert are_alike(got, np.stack(list(known.values())))


@pytest.mark.parametrize("form", FORMS)
def test_clients_with_texts_of_unlike_lengths_share_executions_and_get_their_own_vectors(
    server: RunningServer, form: str
) -> None:
    known = [item for item in known_vectors().items() if len(item[0]) < 100]
    before = figures(server, f"encoder_{form}")
    ready = threading.Barrier(CLIENTS)

    def one(number: int) -> bool:
        text, vector = known[number % len(known)]
        ready.wait()
        return are_alike(ask(server, "grpc", f"minilm_{form}", texts(text))["EMBEDDING"], vector)

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(one, range(CLIENTS)))
    added = figures(server, f"encoder_{form}").since(before)
    assert (added.requests, added.rows) == (CLIENTS, CLIENTS)
    assert added.executions < CLIENTS


def test_a_text_that_is_none_is_refused_by_the_tokenizer_and_hurts_nobody(server: RunningServer) -> None:
    tensor = grpcclient.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"\xff\xfe"]], np.object_))
    with (
        grpcclient.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="tokenizer.*TEXT: 'utf-8' codec") as refused,
    ):
        client.infer("minilm_onnx", [tensor])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
    (text, vector), *_ = known_vectors().items()
    assert are_alike(ask(server, "grpc", "minilm_onnx", texts(text))["EMBEDDING"], vector)


@pytest.mark.parametrize("form", FORMS)
def test_a_text_in_plain_json_becomes_a_vector(server: RunningServer, form: str) -> None:
    (text, vector), *_ = known_vectors().items()
    status, answer = call(server, f"/v2/models/minilm_{form}/generate", {"TEXT": text})
    assert status == 200
    assert are_alike(np.array(answer["EMBEDDING"]), vector)
