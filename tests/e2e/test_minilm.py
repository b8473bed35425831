"""A real model of sentences behind an ensemble: text goes in, a tokenizer in Python and a network make a vector of it.

Asked by Triton's clients and, since its configuration says what it makes, by OpenAI's.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
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


def spoken_vectors() -> dict[str, np.ndarray]:
    """Return the known vectors, but for that of no text, of which OpenAI makes none."""
    return {text: vector for text, vector in known_vectors().items() if text}


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding", [None, "base64", "float"])
@pytest.mark.parametrize("form", FORMS)
def test_openais_client_gets_the_vectors_that_the_package_itself_makes(
    server: RunningServer, form: str, encoding: str | None
) -> None:
    known = spoken_vectors()
    options = {} if encoding is None else {"encoding_format": encoding}
    with client_of(server) as client:
        answer = client.embeddings.create(model=f"minilm_{form}", input=list(known), **options)
    vectors = [one.embedding for one in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), np.float32) for vector in vectors]
    assert [one.index for one in answer.data] == list(range(len(known)))
    assert are_alike(np.array(vectors), np.stack(list(known.values())))
    assert answer.model == f"minilm_{form}"
    assert answer.usage.prompt_tokens > 2 * len(known)


def test_more_texts_than_a_batch_takes_become_vectors_in_order(server: RunningServer) -> None:
    known = list(spoken_vectors().items())[:3]
    with client_of(server) as client:
        answer = client.embeddings.create(
            model="minilm_onnx", input=[known[n % 3][0] for n in range(75)], dimensions=384
        )
    assert are_alike(np.array([one.embedding for one in answer.data]), np.stack([known[n % 3][1] for n in range(75)]))


def test_documents_are_ranked_by_what_they_mean(server: RunningServer) -> None:
    documents = ["The stock market fell today.", "A wheel that a river turns grinds the grain.", "Cats sleep all day."]
    body = {"model": "minilm_onnx", "query": "How does a watermill work?", "documents": documents, "top_n": 2}
    with client_of(server) as client:
        answer = client.post("/rerank", body=body, cast_to=object)
    assert answer["results"][0]["document"] == {"text": documents[1]}
    assert len(answer["results"]) == 2


def test_a_model_that_makes_no_vectors_of_texts_is_told_apart_from_an_unknown_one(server: RunningServer) -> None:
    with client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="encoder_onnx", input="a")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="nothing", input="a")
    assert refused.value.code == "unsupported_model"
