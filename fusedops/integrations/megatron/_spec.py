"""Layer specs: Megatron's local spec with the norms, the attention and the MLP of this package."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from fusedops.compat.megatron import get_bias_dropout_add
from fusedops.integrations.megatron._attention import CoreAttention
from fusedops.integrations.megatron._core import core
from fusedops.integrations.megatron._left import refusal, warn_left
from fusedops.integrations.megatron._mlp import MLP
from fusedops.integrations.megatron._norms import L2Norm, Norm

_specs: Any = core("models.gpt.gpt_layer_specs")
_norms: Any = core("transformer.torch_norm")
_ModuleSpec: Any = core("transformer.spec_utils").ModuleSpec
_TransformerLayer: Any = core("transformer.transformer_layer").TransformerLayer
_OwnMLP: Any = core("transformer.mlp").MLP

_OURS: dict[Any, Any] = {
    _norms.WrappedTorchNorm: Norm,
    core("fusions.fused_layer_norm").FusedLayerNorm: Norm,
    _norms.L2Norm: L2Norm,
    core("transformer.dot_product_attention").DotProductAttention: CoreAttention,
    core("fusions.fused_bias_dropout").get_bias_dropout_add: get_bias_dropout_add,
}
# parameters of Megatron's local spec whose names in its config differ
_IN_CONFIG = {"num_experts": "num_moe_experts"}


class TransformerLayer(_TransformerLayer):
    """Megatron's TransformerLayer, which reads from its config what a spec that is not called cannot be given.

    >>> from megatron.core.transformer.transformer_layer import TransformerLayer as own
    >>> issubclass(TransformerLayer, own)
    True
    """

    def __init__(self, config: Any, submodules: Any = None, *args: Any, **kwargs: Any) -> None:
        if submodules is None:
            submodules = _spec_of(config).submodules
        super().__init__(config, submodules, *args, **kwargs)


class GPTLayerSpec(_ModuleSpec):
    """A ModuleSpec of Megatron: a layer of its local spec with ops. :data:`get_gpt_layer_spec` is the one instance.

    Megatron's ``--spec module name`` hands the named object to the model uncalled. So the object itself is a spec,
    whose layers read their config; called with the arguments of a spec, it returns one for them.

    >>> get_gpt_layer_spec(qk_l2_norm=True).submodules.self_attention.submodules.q_layernorm
    <class 'fusedops.integrations.megatron._norms.L2Norm'>
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the spec for the keyword arguments of Megatron's ``get_gpt_layer_local_spec``.

        With ``config=``, as Megatron calls the specs that it is given, return a layer.

        Args:
            *args: none, unless Megatron builds a layer.
            **options: such as ``normalization="RMSNorm"``, ``qk_layernorm=True`` or ``num_experts=8``.

        Raises:
            InvalidInputError: an argument is given by position, or ``multi_latent_attention`` is True.

        Warns:
            FusedOpsWarning: there are experts: Megatron's own modules compute them.
        """
        if "config" in options:
            own: Any = super()
            return own.__call__(*args, **options)
        if args:
            given = f"positional arguments ({len(args)})"
            needed = "keyword arguments, whose order differs between versions of Megatron"
            raise refusal("get_gpt_layer_spec", given, needed, "name them, as in get_gpt_layer_spec(num_experts=8)")
        return with_ops(_specs.get_gpt_layer_local_spec(**options))


get_gpt_layer_spec = GPTLayerSpec(module=TransformerLayer)


def get_gpt_block_spec(config: Any, **stage: Any) -> Any:
    """Return the spec of all layers of a pipeline stage, with the norm after the last: Megatron's, with ops.

    Args:
        config: Megatron's TransformerConfig. Its patterns of experts (``moe_layer_freq``) and of pipeline stages hold.
        **stage: ``vp_stage`` and ``pp_rank``, as in Megatron's ``get_gpt_decoder_block_spec``.

    Returns:
        Megatron's TransformerBlockSubmodules, for ``GPTModel(transformer_layer_spec=)``.

    Raises:
        InvalidInputError: the config has ``multi_latent_attention``.

    Warns:
        FusedOpsWarning: there are experts: Megatron's own modules compute them.

    >>> import warnings
    >>> from megatron.core.transformer import TransformerConfig
    >>> warnings.simplefilter("ignore")  # of the config, about its own defaults
    >>> config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, normalization="RMSNorm")
    >>> block = get_gpt_block_spec(config, pp_rank=0)
    >>> len(block.layer_specs), block.layer_norm
    (2, <class 'fusedops.integrations.megatron._norms.Norm'>)
    """
    names = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
    block = _specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, **names, **stage)
    layers = [with_ops(layer) for layer in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers, layer_norm=_ours(block.layer_norm))


def with_ops(spec: Any) -> Any:
    """Return a spec of a layer in which Megatron's own local modules are those of this package. Others are kept.

    >>> with_ops(_specs.get_gpt_layer_local_spec()).submodules.pre_mlp_layernorm
    <class 'fusedops.integrations.megatron._norms.Norm'>
    """
    attention = spec.submodules.self_attention
    if attention.module.__name__ == "MLASelfAttention":
        fix = "set it to False, or use Megatron's spec of Transformer Engine"
        raise refusal("get_gpt_layer_spec", "multi_latent_attention = True", "False", fix)
    inner = dataclasses.replace(attention, submodules=_with_ours(attention.submodules))
    layer = _with_ours(spec.submodules)
    return dataclasses.replace(spec, submodules=dataclasses.replace(layer, self_attention=inner, mlp=_mlp(layer.mlp)))


def _ours(part: Any) -> Any:
    """Return what is in the place of a part of a spec; any other part as it is."""
    return _OURS.get(part, part) if callable(getattr(part, "__hash__", None)) else part


def _with_ours(submodules: Any) -> Any:
    fields = {field.name: getattr(submodules, field.name) for field in dataclasses.fields(submodules)}
    return dataclasses.replace(submodules, **{name: _ours(part) for name, part in fields.items()})


def _mlp(part: Any) -> Any:
    """Return the spec of the MLP: a ModuleSpec until megatron-core 0.16, a partial of a class method after it."""
    if isinstance(part, _ModuleSpec) and part.module is _OwnMLP:
        return dataclasses.replace(part, module=MLP)
    builder: Any = getattr(part, "func", None)
    if getattr(builder, "__self__", None) is _OwnMLP:
        return functools.partial(getattr(MLP, builder.__name__), *part.args, **part.keywords)
    name = getattr(part, "module", None) or builder or part
    fix = "no change is needed; the patch reaches the activations of shared experts"
    warn_left("get_gpt_layer_spec", f"{getattr(name, '__qualname__', name)} as the MLP", "a dense MLP", fix)
    return part


def _spec_of(config: Any) -> Any:
    """Return the spec with the settings of a config."""
    if config.num_moe_experts and config.moe_layer_freq != 1:
        raise refusal(
            "get_gpt_layer_spec",
            f"moe_layer_freq = {config.moe_layer_freq!r}, layers of two kinds",
            "layers of one kind",
            "pass transformer_layer_spec=get_gpt_block_spec(config)",
        )
    parameters = inspect.signature(_specs.get_gpt_layer_local_spec).parameters
    known = {name: _IN_CONFIG.get(name, name) for name in parameters if name != "fp8"}  # deprecated, without effect
    return get_gpt_layer_spec(**{name: getattr(config, key) for name, key in known.items() if hasattr(config, key)})
