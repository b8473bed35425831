"""One model in several processes, each with a part of every layer: transformers' plans over torch.distributed, on CPUs.

This process is rank 0 and the engine; the others are its children (`tensor_parallel_rank.py`). Layers end in sums over all
ranks, so each rank has to compute each step with the same rows: rank 0 tells the step before it computes it. What is told is a
step without its requests: tokens, places and block tables. Each rank keeps the K and V of its own heads; only rank 0 samples.

A step that fails leaves the ranks at different places, so nothing is computed any more: the engine ends, and its process with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import torch
import torch.distributed as dist

from headrace_backends.llm.loading import LoadedModel, load
from headrace_backends.llm.settings import Settings
from headrace_backends.llm.step import ModelRunner, SchedulerOutput, StepResult
from headrace_protocol.errors import internal, unsupported

_LENGTH: Final = struct.Struct("<I")
_JOIN: Final = timedelta(seconds=120)
"""How long ranks wait for each other, at the start and in a step."""
_LEAVE_S: Final = 10.0


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first that a child is told: which part of which model it is to load."""

    path: str
    dtype: str
    rank: int
    size: int
    store: str
    """The file by which the ranks find each other."""
    threads: int


class CacheSetup(msgspec.Struct, frozen=True):
    """The second: the cache, which rank 0 sized."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv_cache_dtype: str


class EntryMessage(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has to know of one scheduled request."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    num_sampled_rows: int
    block_table: tuple[int, ...]
    num_prompt_tokens: int
    prompt_logprobs: bool


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """One step."""

    entries: tuple[EntryMessage, ...]
    preempted_ids: tuple[str, ...]
    finished_ids: tuple[str, ...]


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes], kind: Any) -> Any:
    """Return the next message, or None where there will be none."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return msgspec.msgpack.decode(stream.read(_LENGTH.unpack(head)[0]), type=kind)


def load_part(setup: RankSetup) -> LoadedModel:
    """Join the ranks' group and load this rank's part of the model. Raises UNSUPPORTED where it cannot be parted so."""
    torch.set_num_threads(setup.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    store = dist.FileStore(setup.store, setup.size)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.size, timeout=_JOIN)
    loaded = load(Path(setup.path), setup.dtype, ranks=setup.size)
    config = loaded.model.config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise unsupported(
            f"tensor_parallel_size: transformers has no plan by which {type(loaded.model).__name__} is parted; "
            'the engine vllm may have one: "engine": "vllm"'
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, name, None)) is not None and count % setup.size:
            raise unsupported(f"tensor_parallel_size: {name} of the model, {count}, is no multiple of {setup.size}")
    return loaded


def refuse_beside_ranks(settings: Settings, device: str) -> None:
    """Raise UNSUPPORTED where the settings ask for several ranks and for something that only one process can do."""
    wrong = [
        name
        for name, given in (
            (f"the device {device}", device != "cpu"),
            ("enable_lora", settings.enable_lora),
            ("quantization", settings.quantization is not None),
            ("load_format dummy", settings.load_format == "dummy"),
            ("a GGUF file", settings.model.suffix == ".gguf" or not (settings.model / "config.json").is_file()),
        )
        if given
    ]
    if wrong:
        raise unsupported(
            f"tensor_parallel_size: not with {', '.join(wrong)}: this engine parts models of safetensors, on CPUs; "
            'the engine vllm parts more: "engine": "vllm"'
        )


class TensorParallel:
    """The ranks of one model. `load`, then `run` with the cache's size, then `close`; one group in a process at a time."""

    def __init__(self, path: Path, dtype: str, size: int, threads: int) -> None:
        """`size` ranks of `threads` threads each, this process being the first."""
        self._folder: Final = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        store = str(self._folder / "store")
        self._setups: Final = [
            RankSetup(path=str(path), dtype=dtype, rank=rank, size=size, store=store, threads=threads)
            for rank in range(size)
        ]
        self._children: list[subprocess.Popen[bytes]] = []

    def load(self) -> LoadedModel:
        """Start the others, and load this rank's part while they load theirs. Raises as `load_part` does."""
        try:
            for setup in self._setups[1:]:
                child = subprocess.Popen(
                    [sys.executable, "-m", "headrace_backends.llm.tensor_parallel_rank"],
                    stdin=subprocess.PIPE,
                    stdout=2,
                )
                self._children.append(child)
                self._tell(child, setup)
            return load_part(self._setups[0])
        except BaseException:
            self.close()
            raise

    def run(self, runner: ModelRunner) -> TensorParallelRunner:
        """Return a runner that computes with all ranks; `runner` is this rank's."""
        return TensorParallelRunner(self, runner)

    def tell(self, message: msgspec.Struct) -> None:
        """Tell all others. Raises INTERNAL where one is gone."""
        for child in self._children:
            self._tell(child, message)

    def close(self) -> None:
        """End the others."""
        for child in self._children:
            with contextlib.suppress(OSError):
                if child.stdin is not None:
                    child.stdin.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        for child in self._children:
            try:
                child.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, child: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
        assert child.stdin is not None
        try:
            write_message(child.stdin, message)
        except OSError as error:
            raise internal(f"a rank of the model is gone (exit code {child.poll()})") from error


class TensorParallelRunner:
    """Computes each step on all ranks."""

    def __init__(self, ranks: TensorParallel, runner: ModelRunner) -> None:
        self._ranks: Final = ranks
        self._runner: Final = runner
        self._broken: str | None = None

    def execute(self, step: SchedulerOutput) -> Sequence[StepResult]:
        if self._broken is not None:
            raise RuntimeError(f"the ranks are not in step any more: {self._broken}")
        try:
            self._ranks.tell(told(step))
            return self._runner.execute(step)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise


def told(step: SchedulerOutput) -> StepMessage:
    """Return a step as the other ranks are told it."""
    entries = tuple(
        EntryMessage(
            entry.request.id,
            entry.start,
            tuple(entry.token_ids),
            entry.num_sampled_rows,
            entry.block_table,
            entry.request.num_prompt_tokens,
            entry.request.params.prompt_logprobs is not None,
        )
        for entry in step.scheduled
    )
    return StepMessage(entries, step.preempted_ids, step.finished_ids)
