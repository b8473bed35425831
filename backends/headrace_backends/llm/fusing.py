"""Builds a model's fused layers from transformers' own, and holds each to what it replaces.

Architectures are named here and nowhere else. What a layer gives for random tokens is compared when a model is loaded; a layer
that gives something else stays as it was, and a line of the log says so. Weights that are not needed any more are given back
at once, layer by layer, so that a model is in memory little more than once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from headrace_backends.llm import kernels
from headrace_backends.llm.attention import STEP, SequenceSpan, ShapeProbe
from headrace_backends.llm.attention_compiled import fits_shapes
from headrace_backends.llm.attention_paged import PagedStep
from headrace_backends.llm.kv_cache import KvCache
from headrace_backends.llm.packed_linears import Linear, Maker

if TYPE_CHECKING:  # they import numba, which may not be there
    from headrace_backends.llm.fused_layers import Form, Forward, Turns

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How an architecture differs from Llama."""

    one_more: bool = False
    """Norms multiply by one more than their weights."""
    turned_by_kind: bool = False
    """Layers of different kinds turn queries and keys by different angles."""


_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "llama": _Architecture(),
    "mistral": _Architecture(),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "phi3": _Architecture(),
    "gemma2": _Architecture(one_more=True),
    "gemma3_text": _Architecture(one_more=True, turned_by_kind=True),
}
"""By the `model_type` of their configuration."""
_BY_TANGENT: Final = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
_DIFFERENCE: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""So much of a layer's output, by its length, may be different: sums are in another order."""
_DIFFERENCE_OF_FEW_BITS: Final = {"int8": 0.05, "int4": 0.4}
"""The same where weights are rounded; what is wrong differs by its whole length."""
_TOKENS: Final = 6
"""That replacements are held to."""


@dataclass(slots=True)
class _Observed:
    """What the original gives."""

    tokens: torch.Tensor
    positions: torch.Tensor
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Of each layer, [1, tokens, width]."""
    logits: torch.Tensor | None = None

    def see(self, given: torch.Tensor, output: Any) -> None:
        self.inputs.append(given.clone())
        self.outputs.append((output[0] if isinstance(output, tuple) else output).clone())


class FusedModel:
    """A language model as programs of its layers. Runs under inference mode, in one thread at a time."""

    def __init__(self, base: Any, form: Form, layers: list[Any], head: Linear) -> None:
        from headrace_backends.llm.fused_layers import Forward
        from headrace_backends.llm.kernels.panels import FEW_ROWS

        self._make: Final = Forward
        self._few_rows: Final = FEW_ROWS
        self._base: Final = base
        self._form: Final = form
        self.layers: Final = layers
        """All must be there before the first call."""
        self._head: Final = head
        self._softcap: Final[float | None] = getattr(base.config, "final_logit_softcapping", None)
        self._forwards: dict[bool, Forward] = {}
        """For few rows, and for many; over the cache of the last step."""

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: PagedStep, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens [T], their positions [T], and rows [R] of them; return logits [R, vocabulary], hidden states [T, width].

        The hidden states stay until the next call.
        """
        few = len(tokens) <= self._few_rows
        forward = self._forwards.get(few)
        if forward is None or forward.cache is not step.cache:
            forward = self._forwards[few] = self.forward(self.layers, step.cache, few=few)
        embedded = self._base.embed_tokens(tokens[None])[0]
        hidden = forward(embedded, positions, step, self.turns(embedded, positions))
        return self.logits(hidden.index_select(0, rows)), hidden

    def forward(self, layers: list[Any], cache: KvCache, *, few: bool = True) -> Forward:
        """Return the program of layers and of the last norm."""
        return self._make(self._form, cache, layers, self._base.norm.weight, few=few)

    def turns(self, embedded: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Return cosines and sines of positions [T]."""
        return turns_of(self._base, self._form.turned, embedded, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take normed hidden states [R, width]; return [R, vocabulary]."""
        logits = self._head(hidden)
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits


def turns_of(base: Any, kinds: Iterable[str | None], embedded: torch.Tensor, positions: torch.Tensor) -> Turns:
    """Return cosines and sines of positions [T] for each kind of layer, in the dtype of `embedded` [T, width]."""
    turns = {}
    for kind in kinds:
        more = () if kind is None else (kind,)
        cosines, sines = base.rotary_emb(embedded, positions[None], *more)
        turns[kind] = (cosines[0].contiguous(), sines[0].contiguous())
    return turns


def fused(model: Any, probe: ShapeProbe, quantization: str | None = None) -> FusedModel | None:
    """Return the model in fused calls, which then has taken its weights over; None where that cannot be, as it logs.

    `probe` has seen the model's layers. The model's attention must be the one of `attention`. `quantization` of weights is
    "int8" or "int4"; the norms' and the embedding's stay. Raises INVALID_ARG for another.
    """
    name = type(model).__name__
    architecture = _ARCHITECTURES.get(model.config.get_text_config().model_type)
    if architecture is None or model.device.type != "cpu" or model.dtype not in _DIFFERENCE:
        _LOG.info("%s in %s on %s runs as transformers has it", name, model.dtype, model.device)
        return None
    if not kernels.available() or not fits_shapes(probe.layers.values()):
        return None
    from headrace_backends.llm.panel_linears import maker

    make = maker(quantization)
    limit = _DIFFERENCE_OF_FEW_BITS[quantization] if quantization else _DIFFERENCE[model.dtype]
    try:
        with torch.inference_mode():
            return _Builder(model, architecture, probe, make, limit).build()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        _LOG.warning("%s runs as transformers has it: its layers cannot be fused: %r", name, error)
        return None


class _Builder:
    """Fuses one model."""

    def __init__(self, model: Any, architecture: _Architecture, probe: ShapeProbe, make: Maker, limit: float) -> None:
        """Take what makes products, and how far a layer's output may be from the original's."""
        from headrace_backends.llm.fused_layers import Form

        self._model: Final = model
        self._base: Final = model.base_model
        self._probe: Final = probe
        self._by_kind: Final = architecture.turned_by_kind
        self._make: Final = make
        self._limit: Final = limit
        config = self._base.config
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        kinds = list(dict.fromkeys(self._kind(layer) for layer in self._base.layers))
        one = torch.zeros(1, config.hidden_size, dtype=model.dtype)
        turns = turns_of(self._base, kinds, one, torch.zeros(1, dtype=torch.long))
        self._form: Final = Form(
            narrow=model.dtype == torch.bfloat16,
            one_more=architecture.one_more,
            by_tangent=_BY_TANGENT[activation],
            epsilon=config.rms_norm_eps,
            width=config.hidden_size,
            turned={kind: cosines.shape[1] for kind, (cosines, _) in turns.items()},
        )

    def build(self) -> FusedModel:
        base, model = self._base, self._model
        observed = self._observe()
        head = model.get_output_embeddings()
        fused = FusedModel(base, self._form, [], self._head(head))
        self._check_head(fused, observed)
        replaced = 0
        for at, layer in enumerate(base.layers):
            fused.layers.append(self._layer(at, layer, fused, observed))
            replaced += fused.layers[at].fused
        if head.weight is not base.embed_tokens.weight:
            head.weight = None
        _LOG.info("%s: %d of %d layers are fused", type(model).__name__, replaced, len(fused.layers))
        return fused

    def _head(self, head: Any) -> Linear:
        return self._make(head.weight.detach(), None if head.bias is None else head.bias.detach())

    def _observe(self) -> _Observed:
        """Run the original over a few random tokens."""
        numbers = torch.Generator().manual_seed(0)
        vocabulary = self._base.embed_tokens.num_embeddings
        observed = _Observed(torch.randint(vocabulary, (_TOKENS,), generator=numbers), torch.arange(_TOKENS))
        hooks = [
            layer.register_forward_hook(lambda _layer, inputs, output: observed.see(inputs[0], output))
            for layer in self._base.layers
        ]
        try:
            observed.logits = self._model(
                input_ids=observed.tokens[None],
                position_ids=observed.positions[None],
                use_cache=False,
                **{STEP: self._step()},
            ).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return observed

    def _step(self) -> PagedStep:
        cache = KvCache(self._probe.layers, 2, _TOKENS, self._model.dtype)
        return PagedStep(cache, [SequenceSpan(0, _TOKENS, 0, [1])], range(_TOKENS, 2 * _TOKENS))

    def _run(self, fused: FusedModel, layers: list[Any], given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what layers make of hidden states [tokens, width] of the observed tokens, and that normed."""
        step, positions = self._step(), torch.arange(_TOKENS)
        forward = fused.forward(layers, step.cache)
        normed = forward(given, positions, step, fused.turns(given, positions))
        return forward.residual.tensor[:_TOKENS], normed

    def _check_head(self, fused: FusedModel, observed: _Observed) -> None:
        _, normed = self._run(fused, [], observed.outputs[-1][0])
        assert observed.logits is not None
        difference = _difference(fused.logits(normed), observed.logits)
        if not difference <= self._limit:
            raise ValueError(f"logits differ by {difference:.1e} of their length")

    def _layer(self, at: int, layer: Any, fused: FusedModel, observed: _Observed) -> Any:
        """Return the layer fused, its own weights then gone; or the layer itself where it gives something else so."""
        from headrace_backends.llm.fused_layers import FusedLayer, OriginalLayer

        how, shape = self._probe.how[at], self._probe.layers[at]
        attention = layer.self_attn
        try:
            heads = (attention.o_proj.in_features // shape.value_dim, shape.kv_heads)
            dims = (shape.key_dim, shape.value_dim)
            replacement = FusedLayer(self._parts(layer), how, heads, dims, self._kind(layer))
            residual, _ = self._run(fused, [replacement], observed.inputs[at][0])
            difference = _difference(residual, observed.outputs[at][0])
            if difference <= self._limit:
                for parameter in layer.parameters():
                    parameter.data = parameter.data.new_empty(0)
                return replacement
            reason = f"differs by {difference:.1e} of its output's length"
        except (AttributeError, RuntimeError, TypeError) as error:
            reason = repr(error)
        _LOG.warning("layer %d of %s stays as it is: fused it %s", at, type(self._model).__name__, reason)
        return OriginalLayer(layer, self._kind(layer), self._base.norm.weight)

    def _kind(self, layer: Any) -> str | None:
        kind: str | None = layer.self_attn.layer_type if self._by_kind else None
        return kind

    def _parts(self, layer: Any) -> Any:
        """Return a layer's weights as fused calls want them."""
        from headrace_backends.llm.fused_layers import Parts

        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            together, gate_up = [attention.qkv_proj], [mlp.gate_up_proj]
        else:
            together, gate_up = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
        around = hasattr(layer, "pre_feedforward_layernorm")
        return Parts(
            query_key_value=self._joined(together),
            attention_output=self._joined([attention.o_proj]),
            gate_up=self._joined(gate_up),
            down=self._joined([mlp.down_proj]),
            gates=mlp.down_proj.in_features,
            input_norm=layer.input_layernorm.weight.detach(),
            mlp_norm=(layer.pre_feedforward_layernorm if around else layer.post_attention_layernorm).weight.detach(),
            query_norm=_norm(attention, "q_norm"),
            key_norm=_norm(attention, "k_norm"),
            attention_output_norm=_norm(layer, "post_attention_layernorm") if around else None,
            mlp_output_norm=_norm(layer, "post_feedforward_layernorm"),
        )

    def _joined(self, linears: list[Any]) -> Linear:
        """Return one product for several with the same input."""
        if len(linears) == 1:
            weight, bias = linears[0].weight.detach(), linears[0].bias
        else:
            weight = torch.cat([each.weight for each in linears])
            biases = [each.bias for each in linears]
            bias = None if biases[0] is None else torch.cat(biases)
        return self._make(weight, None if bias is None else bias.detach())


def _norm(module: Any, name: str) -> torch.Tensor | None:
    norm = getattr(module, name, None)
    return None if norm is None else norm.weight.detach()


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the length of the difference of two tensors, as a part of the second's."""
    return float((one.float() - other.float()).norm() / other.float().norm())
