"""What guesses the next tokens, as a model's settings ask: nothing, n-grams, or a draft model that is loaded here."""

from __future__ import annotations

from typing import Any, Final

from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.draft_model import DraftModelConfig, DraftModelDrafter
from headrace_backends.llm.kv_cache import bytes_per_block
from headrace_backends.llm.loading import LoadedModel, load
from headrace_backends.llm.ngram import Drafter, NgramConfig, NgramDrafter
from headrace_backends.llm.runner import TorchRunner, cached_shapes
from headrace_backends.llm.settings import Speculation
from headrace_protocol.errors import invalid


class Drafting:
    """Made before the large model's cache is sized, since a draft model takes memory; `drafter` comes after."""

    def __init__(self, rule: Speculation | None, target: LoadedModel, block_size: int, device: str) -> None:
        """Load the draft model, if the settings name one; in the large model's dtype.

        Raises as `load` does, and INVALID_ARG where its tokenizer is another one.
        """
        self._rule: Final = rule
        self._target: Final = target
        self._block_size: Final = block_size
        self._draft: LoadedModel | None = None
        self.block_bytes = 0
        """What each block of the large model's cache takes here besides: the draft model has as many."""
        if rule is not None and rule.model is not None and rule.method == "draft_model":
            self._draft = load(rule.model, str(target.dtype).removeprefix("torch."), device=device)
            check_same_tokens(target.tokenizer, self._draft.tokenizer)
            shapes = cached_shapes(self._draft.model)
            self.block_bytes = bytes_per_block(shapes, block_size, self._draft.dtype)

    def drafter(self, num_blocks: int, max_model_len: int) -> Drafter | None:
        """Return what guesses, for a cache of so many blocks. Raises ValueError for settings that make no sense."""
        rule = self._rule
        if rule is None:
            return None
        if self._draft is None:
            return ngram_drafter(rule)
        length = min(max_model_len, self._draft.max_model_len)
        config = _given(DraftModelConfig, rule, max_model_len=length, vocab_size=self._target.vocab_size)
        runner = TorchRunner(self._draft.model, num_blocks, self._block_size, length, fuse=True)
        return DraftModelDrafter(config, runner, BlockManager(num_blocks, self._block_size))


def ngram_drafter(rule: Speculation) -> Drafter:
    """Return what guesses out of what was said before. Raises ValueError for settings that make no sense."""
    return NgramDrafter(_given(NgramConfig, rule, "prompt_lookup_min", "prompt_lookup_max"))


def check_same_tokens(tokenizer: Any, drafts: Any) -> None:
    """Raise INVALID_ARG where the draft model's tokens are not the large model's: its guesses would mean something else."""
    mine, others = ({token: text for text, token in each.get_vocab().items()} for each in (tokenizer, drafts))
    differing = next(
        (token for token in sorted(mine.keys() | others.keys()) if mine.get(token) != others.get(token)), None
    )
    if differing is not None:
        raise invalid(
            "speculative_config.model: the draft model has another tokenizer than the model: "
            f"token {differing} is {others.get(differing)!r} for the first and {mine.get(differing)!r} for the second"
        )


def _given(config: type, rule: Speculation, *names: str, **more: int) -> Any:
    """Return the drafter's settings with what the model's settings say of them."""
    values = {name: getattr(rule, name) for name in names}
    if rule.num_speculative_tokens is not None:
        values["num_speculative_tokens"] = rule.num_speculative_tokens
    if rule.disable_by_batch_size is not None:
        values["disable_above"] = rule.disable_by_batch_size
    return config(**values, **more)
