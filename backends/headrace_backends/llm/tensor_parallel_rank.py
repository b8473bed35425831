"""The process of a rank above 0: computes the steps that rank 0 tells it over stdin, and keeps the K and V of its heads.

Ends when there is nothing more to read, and by an error when the group breaks: so it never outlives rank 0.
"""

from __future__ import annotations

import sys
from typing import Final

from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.runner import TorchRunner, cached_shapes
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput
from headrace_backends.llm.tensor_parallel import CacheSetup, RankSetup, StepMessage, load_part, read_message

_GREEDY: Final = SamplingParams(temperature=0)
_TELLS_PROMPT: Final = SamplingParams(temperature=0, prompt_logprobs=0)


def main() -> int:
    stream = sys.stdin.buffer
    setup = read_message(stream, RankSetup)
    if setup is None:
        return 0
    model = load_part(setup).model
    cached_shapes(model)  # as rank 0 does, to size the cache: it takes a forward of all ranks
    cache = read_message(stream, CacheSetup)
    if cache is None:
        return 0
    runner = TorchRunner(
        model, cache.num_blocks, cache.block_size, cache.max_model_len, kv_cache_dtype=cache.kv_cache_dtype
    )
    while (message := read_message(stream, StepMessage)) is not None:
        runner.execute(step_of(message))
    return 0


def step_of(message: StepMessage) -> SchedulerOutput:
    """Return the step with stand-ins for its requests: of equal rows, sampled greedily and thrown away."""
    scheduled = tuple(
        ScheduledRequest(
            request=GenerationRequest(
                entry.request_id,
                (0,) * entry.num_prompt_tokens,
                _TELLS_PROMPT if entry.prompt_logprobs else _GREEDY,
                seed=0,
            ),
            start=entry.start,
            token_ids=entry.token_ids,
            num_drafts=max(0, entry.num_sampled_rows - 1),
            num_sampled_rows=entry.num_sampled_rows,
            block_table=entry.block_table,
        )
        for entry in message.entries
    )
    tokens = sum(len(entry.token_ids) for entry in scheduled)
    return SchedulerOutput(scheduled, tokens, message.preempted_ids, message.finished_ids)


if __name__ == "__main__":
    sys.exit(main())
