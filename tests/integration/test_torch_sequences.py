"""A TorchScript model of sequences: controls and states are arguments of its forward, like any other input."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import RunningServer, running
from sequence_models import DIRECT, accumulator_config, add, oldest

torch = pytest.importorskip("torch")
from torch_models import save_script  # noqa: E402 - it imports torch

STRATEGIES = {"direct": DIRECT, "oldest": oldest(3)}
STATE = 'state [ { input_name: "STATE_IN" output_name: "STATE__1" data_type: TYPE_INT32 dims: [ 1 ] } ]'


class Accumulator(torch.nn.Module):
    """Gives the sum of a sequence, twice: as output and as state."""

    def forward(
        self,
        INPUT0: torch.Tensor,  # noqa: N803 - the names of the model's inputs
        START: torch.Tensor,  # noqa: N803
        STATE_IN: torch.Tensor,  # noqa: N803
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.where(START == 1, torch.zeros_like(STATE_IN), STATE_IN) + INPUT0
        return total, total


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for name, strategy in STRATEGIES.items():
        (repository / name / "1").mkdir(parents=True)
        save_script(repository / name / "1" / "model.pt", Accumulator())
        text = accumulator_config(strategy, state=STATE).replace('"OUTPUT0"', '"OUTPUT__0"')
        (repository / name / "config.pbtxt").write_text(f'backend: "pytorch" {text}')
    with running(repository) as started:
        yield started


@pytest.mark.parametrize("model", STRATEGIES)
def test_sums_of_a_torchscript_model_keep_to_their_sequences(server: RunningServer, model: str) -> None:
    def play(number: int) -> list[int]:
        return [add(server, model, number, number, start=at == 0, end=at == 5)[1] for at in range(6)]

    with ThreadPoolExecutor(8) as pool:
        sums = dict(zip(range(1, 13), pool.map(play, range(1, 13)), strict=True))
    assert sums == {number: [number * (at + 1) for at in range(6)] for number in range(1, 13)}
