"""Small random models of many families of diffusers, with inputs, for tests and for the table in docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
_TEXT = ("encoder_hidden_states", (1, 12, 16))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Family:
    """A family by its class in diffusers: how a small model is made and called.

    Attributes:
        model: the name of the class.
        config: what it is made with.
        shapes: of the floating inputs.
        others: makes the other inputs.
    """

    model: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    others: Callable[[], dict[str, Any]] = dict

    def build(self) -> Module:
        import diffusers

        torch.manual_seed(0)
        model = getattr(diffusers, self.model)(**self.config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():  # a gate of zeros would hide what lies behind it
                    parameter.normal_(0, 0.05)
        return model

    def inputs(self) -> dict[str, Any]:
        floating = {name: drawn(seed, *shape) for seed, (name, shape) in enumerate(self.shapes.items())}
        return {**floating, **self.others()}


def steps(count: int, name: str = "timestep", /, **others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.arange(count) * 300 + 7, **{key: each() for key, each in others.items()}}


def seen(count: int, kept: int, dtype: torch.dtype = torch.bool) -> Callable[[], Tensor]:
    """The mask of two texts, of which the second is shorter."""
    return lambda: (torch.arange(count) < torch.tensor([[count], [kept]])).to(dtype)


def places(count: int, axes: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: (torch.arange(count * axes).view(count, axes) % 7).to(dtype)


def flux(**config: Any) -> dict[str, Any]:
    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
    return {**sizes, **heads, **config}


FLUX = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 12, 32)}
FLUX_OTHERS = steps(1, img_ids=places(16, 3), txt_ids=places(12, 3))
IMAGE, VIDEO = {"hidden_states": (2, 4, 8, 8)}, {"hidden_states": (1, 4, 2, 8, 8)}
ADA = {"in_channels": 4, "out_channels": 8, "num_layers": 1, "patch_size": 2, "sample_size": 8, **_HEADS}
WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 1}
WAN |= {"num_attention_heads": 2, "attention_head_dim": 12, "cross_attn_norm": True, "rope_max_seq_len": 32}
UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "in_channels": 4}
CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "out_channels": 4,
}
SDXL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 32,
    "use_linear_projection": True,
}
VAE = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
UNET_INPUTS = {"sample": (2, 4, 16, 16), "encoder_hidden_states": (2, 6, 16)}


def _added() -> dict[str, Tensor]:
    return {"text_embeds": drawn(8, 2, 8), "time_ids": torch.arange(12.0).view(2, 6)}


FAMILIES: dict[str, Family] = {
    "DiT": Family(
        "DiTTransformer2DModel",
        {**ADA, "num_embeds_ada_norm": 8, "activation_fn": "gelu-approximate"},
        IMAGE,
        steps(2, class_labels=lambda: torch.tensor([1, 3])),
    ),
    "PixArt": Family(
        "PixArtTransformer2DModel",
        {**ADA, "cross_attention_dim": 16, "use_additional_conditions": False},
        {**IMAGE, "encoder_hidden_states": (2, 6, 16)},
        steps(
            2,
            encoder_attention_mask=seen(6, 4),
            added_cond_kwargs=lambda: dict.fromkeys(("resolution", "aspect_ratio")),
        ),
    ),
    "SD3": Family(
        "SD3Transformer2DModel",
        {
            **{"sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, **_HEADS},
            **{"caption_projection_dim": 16, "joint_attention_dim": 16, "pooled_projection_dim": 8},
            **{"pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        },
        {**IMAGE, "encoder_hidden_states": (2, 6, 16), "pooled_projections": (2, 8)},
        steps(2),
    ),
    "Flux": Family(
        "FluxTransformer2DModel", flux(pooled_projection_dim=8), {**FLUX, "pooled_projections": (1, 8)}, FLUX_OTHERS
    ),
    "Flux 2": Family(
        "Flux2Transformer2DModel",
        flux(axes_dims_rope=(4, 4, 4, 4)),
        FLUX,
        steps(
            1,
            img_ids=lambda: places(16, 4, torch.int64)()[None],
            txt_ids=lambda: places(12, 4, torch.int64)()[None],
            guidance=lambda: torch.ones(1),
        ),
    ),
    "Chroma": Family(
        "ChromaTransformer2DModel",
        flux(approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1),
        FLUX,
        FLUX_OTHERS,
    ),
    "Bria": Family("BriaTransformer2DModel", flux(pooled_projection_dim=None), FLUX, FLUX_OTHERS),
    "Ovis-Image": Family("OvisImageTransformer2DModel", flux(out_channels=4), FLUX, FLUX_OTHERS),
    "Wan": Family("WanTransformer3DModel", WAN, dict([*VIDEO.items(), _TEXT]), steps(1)),
    "SkyReels-V2": Family("SkyReelsV2Transformer3DModel", WAN, dict([*VIDEO.items(), _TEXT]), steps(1)),
    "HunyuanVideo": Family(
        "HunyuanVideoTransformer3DModel",
        {
            **{"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10},
            **{"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1},
            **{"text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
        },
        {"hidden_states": (2, 4, 1, 6, 6), "encoder_hidden_states": (2, 12, 16), "pooled_projections": (2, 8)},
        steps(2, encoder_attention_mask=seen(12, 5), guidance=lambda: torch.ones(2)),
    ),
    "HunyuanDiT": Family(
        "HunyuanDiT2DModel",
        {
            **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, **_HEADS, "hidden_size": 16},
            **{"cross_attention_dim": 8, "cross_attention_dim_t5": 8, "pooled_projection_dim": 4, "text_len": 4},
            **{"text_len_t5": 4, "activation_fn": "gelu-approximate"},
        },
        {**IMAGE, "encoder_hidden_states": (2, 4, 8), "encoder_hidden_states_t5": (2, 4, 8), "image_meta_size": (2, 6)},
        steps(
            2,
            text_embedding_mask=seen(4, 2, torch.float32),
            text_embedding_mask_t5=seen(4, 3, torch.float32),
            timestep=lambda: torch.tensor([7.0, 300.0]),
            style=lambda: torch.zeros(2, dtype=torch.int64),
            image_rotary_emb=lambda: tuple(each.repeat_interleave(2, -1) for each in drawn(9, 2, 16, 4)),
        ),
    ),
    "LTX-Video": Family(
        "LTXVideoTransformer3DModel",
        {
            **{"in_channels": 4, "out_channels": 4, **_HEADS, "cross_attention_dim": 16, "num_layers": 1},
            **{"qk_norm": "rms_norm_across_heads", "caption_channels": 16},
        },
        {"hidden_states": (2, 32, 4), "encoder_hidden_states": (2, 6, 16)},
        steps(
            2,
            encoder_attention_mask=seen(6, 4),
            num_frames=lambda: 2,
            height=lambda: 4,
            width=lambda: 4,
        ),
    ),
    "CogVideoX": Family(
        "CogVideoXTransformer3DModel",
        {
            **{"in_channels": 4, "out_channels": 4, **_HEADS, "time_embed_dim": 4, "text_embed_dim": 8},
            **{"num_layers": 1, "sample_width": 8, "sample_height": 8, "sample_frames": 8, "patch_size": 2},
            **{"max_text_seq_length": 6, "use_rotary_positional_embeddings": True},
        },
        {"hidden_states": (2, 1, 4, 8, 8), "encoder_hidden_states": (2, 6, 8)},
        steps(2, image_rotary_emb=lambda: tuple(each.repeat_interleave(2, -1) for each in drawn(9, 2, 16, 4))),
    ),
    "CogView4": Family(
        "CogView4Transformer2DModel",
        {
            **{"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS},
            **{"text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4},
        },
        {**IMAGE, "encoder_hidden_states": (2, 6, 8)},
        steps(
            2,
            original_size=lambda: torch.tensor([[20.0, 20], [20, 20]]),
            target_size=lambda: torch.tensor([[20.0, 20], [20, 20]]),
            crop_coords=lambda: torch.zeros(2, 2),
        ),
    ),
    "Lumina": Family(
        "LuminaNextDiT2DModel",
        {
            **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1},
            **{"num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16, "learn_sigma": False},
            **{"cross_attention_dim": 32, "qk_norm": True},
        },
        {**IMAGE, "encoder_hidden_states": (2, 6, 32)},
        lambda: {
            "timestep": torch.tensor([0.2, 0.7]),
            "encoder_mask": seen(6, 4, torch.float32)(),
            "image_rotary_emb": torch.polar(torch.ones(384, 384, 4), drawn(9, 384, 384, 4)),
            "cross_attention_kwargs": {},
        },
    ),
    "Lumina 2": Family(
        "Lumina2Transformer2DModel",
        {
            **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1},
            **{"num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2},
            **{"axes_dim_rope": (4, 2, 2), "axes_lens": (32, 32, 32), "cap_feat_dim": 32},
        },
        {**IMAGE, "encoder_hidden_states": (2, 6, 32)},
        lambda: {"timestep": torch.tensor([0.2, 0.7]), "encoder_attention_mask": seen(6, 4)()},
    ),
    "Sana": Family(
        "SanaTransformer2DModel",
        {
            **{"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, **_HEADS, "sample_size": 8},
            **{"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16},
            **{"caption_channels": 8},
        },
        {**IMAGE, "encoder_hidden_states": (2, 6, 8)},
        steps(2, encoder_attention_mask=seen(6, 4)),
    ),
    "Z-Image": Family(
        "ZImageTransformer2DModel",
        {
            **{"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 16, "n_layers": 1},
            **{"n_refiner_layers": 1, "n_heads": 1, "n_kv_heads": 2, "cap_feat_dim": 16, "rope_theta": 256.0},
            **{"axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32]},
        },
        others=lambda: {"x": [drawn(0, 16, 1, 8, 8)], "cap_feats": [drawn(1, 16, 16)], "t": torch.tensor([0.3])},
    ),
    "Qwen-Image": Family(
        "QwenImageTransformer2DModel",
        {
            **{"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16},
            **{"num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
        },
        {"hidden_states": (2, 16, 16), "encoder_hidden_states": (2, 6, 16)},
        steps(
            2,
            encoder_hidden_states_mask=seen(6, 4, torch.int64),
            img_shapes=lambda: [(1, 4, 4), (1, 4, 4)],
        ),
    ),
    "AuraFlow": Family(
        "AuraFlowTransformer2DModel",
        {
            **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, **_HEADS},
            **{"num_mmdit_layers": 1, "num_single_dit_layers": 1, "caption_projection_dim": 16},
            **{"joint_attention_dim": 16, "pos_embed_max_size": 16},
        },
        {**IMAGE, "encoder_hidden_states": (2, 6, 16)},
        steps(2),
    ),
    "Mochi": Family(
        "MochiTransformer3DModel",
        {
            **{"patch_size": 2, **_HEADS, "num_layers": 2, "pooled_projection_dim": 16, "in_channels": 4},
            **{"text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 6},
        },
        {"hidden_states": (2, 4, 1, 8, 8), "encoder_hidden_states": (2, 6, 16)},
        steps(2, encoder_attention_mask=seen(6, 4)),
    ),
    "Allegro": Family(
        "AllegroTransformer3DModel",
        {
            **{
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 1,
            },
            **{"cross_attention_dim": 24, "sample_width": 8, "sample_height": 8, "sample_frames": 8},
            **{"caption_channels": 8},
        },
        {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 6, 8)},
        steps(
            2,
            encoder_attention_mask=seen(6, 4),
            image_rotary_emb=lambda: (
                tuple((drawn(9 + at, 32, 4), drawn(12 + at, 32, 4)) for at in range(3)),
                tuple(torch.arange(32)[None].expand(2, -1) % (at + 2) for at in range(3)),
            ),
        ),
    ),
    "ERNIE-Image": Family(
        "ErnieImageTransformer2DModel",
        {
            **{"hidden_size": 16, "num_attention_heads": 1, "num_layers": 1, "ffn_hidden_size": 16, "patch_size": 1},
            **{"in_channels": 4, "out_channels": 4, "text_in_dim": 16, "rope_axes_dim": (8, 4, 4)},
        },
        {"hidden_states": (1, 4, 6, 6), "text_bth": (1, 6, 16)},
        lambda: {"timestep": torch.tensor([7.0]), "text_lens": torch.tensor([6])},
    ),
    "Latte": Family(
        "LatteTransformer3DModel",
        {
            **ADA,
            "caption_channels": 8,
            "cross_attention_dim": 16,
            "norm_type": "ada_norm_single",
            "video_length": 2,
            "attention_bias": True,
        },
        {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 6, 8)},
        steps(2),
    ),
    "HiDream": Family(
        "HiDreamImageTransformer2DModel",
        {
            **{"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1},
            **{**_HEADS, "caption_channels": [8, 4], "text_emb_dim": 8, "axes_dims_rope": (4, 2, 2)},
            **{"max_resolution": (8, 8), "llama_layers": (0, 1), "num_routed_experts": 2, "num_activated_experts": 2},
            **{"force_inference_output": True},
        },
        {
            **{**IMAGE, "encoder_hidden_states_t5": (2, 6, 8), "encoder_hidden_states_llama3": (2, 2, 6, 4)},
            **{"pooled_embeds": (2, 8)},
        },
        steps(2, "timesteps"),
    ),
    "Krea 2": Family(
        "Krea2Transformer2DModel",
        {
            **{"in_channels": 16, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "intermediate_size": 32, "timestep_embed_dim": 8, "text_hidden_dim": 16},
            **{"num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 1},
            **{"text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
            **{"axes_dims_rope": (4, 2, 2)},
        },
        {"hidden_states": (2, 4, 16), "encoder_hidden_states": (2, 4, 3, 16)},
        lambda: {
            "timestep": torch.tensor([0.2, 0.7]),
            "position_ids": places(8, 3)(),
            "encoder_attention_mask": seen(4, 3)(),
        },
    ),
    "Stable Audio 3": Family(
        "StableAudio3DiTModel",
        {
            **{"io_channels": 8, "patch_size": 1, "embed_dim": 32, "depth": 1, "num_heads": 4, "cond_token_dim": 16},
            **{"global_cond_dim": 12, "timestep_features_dim": 16, "ff_mult": 2, "num_memory_tokens": 3},
        },
        {"hidden_states": (2, 8, 16), "encoder_hidden_states": (2, 4, 16), "global_hidden_states": (2, 12)},
        lambda: {"timestep": torch.tensor([0.2, 0.7])},
    ),
    "UNet": Family(
        "UNet2DModel",
        {
            **{**UNET, "out_channels": 4, "sample_size": 16, "attention_head_dim": 4},
            **{
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            },
        },
        {"sample": (2, 4, 16, 16)},
        steps(2),
    ),
    "Stable Diffusion's UNet": Family("UNet2DConditionModel", {**UNET, **CROSS}, UNET_INPUTS, steps(2)),
    "SDXL's UNet": Family(
        "UNet2DConditionModel", {**UNET, **CROSS, **SDXL}, UNET_INPUTS, steps(2, added_cond_kwargs=_added)
    ),
    "ControlNet": Family(
        "ControlNetModel",
        {
            **{**UNET, "cross_attention_dim": 16, "attention_head_dim": 2},
            **{"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")},
            **{"conditioning_embedding_out_channels": (4, 8)},
        },
        {**UNET_INPUTS, "controlnet_cond": (2, 3, 32, 32)},
        steps(2),
    ),
    "Stable Video Diffusion's UNet": Family(
        "UNetSpatioTemporalConditionModel",
        {
            **{"block_out_channels": (32, 32), "cross_attention_dim": 32, "num_attention_heads": 2, "in_channels": 4},
            **{"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal")},
            **{"up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "layers_per_block": 1},
            **{"projection_class_embeddings_input_dim": 96, "addition_time_embed_dim": 32, "out_channels": 4},
        },
        {"sample": (1, 2, 4, 8, 8), "encoder_hidden_states": (1, 1, 32), "added_time_ids": (1, 3)},
        steps(1),
    ),
    "AutoencoderKL": Family("AutoencoderKL", VAE, {"sample": (2, 3, 16, 16)}),
    "VQ": Family("VQModel", {**VAE, "latent_channels": 3}, {"sample": (2, 3, 16, 16)}),
    "Deep compression autoencoder": Family(
        "AutoencoderDC",
        {
            **{"latent_channels": 4, "attention_head_dim": 2, "encoder_block_types": ("ResBlock", "EfficientViTBlock")},
            **{"decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8)},
            **{"decoder_block_out_channels": (8, 8), "encoder_qkv_multiscales": ((), (5,))},
            **{"decoder_qkv_multiscales": ((), (5,)), "encoder_layers_per_block": (1, 1)},
            **{"decoder_layers_per_block": [1, 1], "downsample_block_type": "conv"},
            **{"upsample_block_type": "interpolate", "decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"},
        },
        {"sample": (1, 3, 16, 16)},
    ),
    "Wan's autoencoder": Family(
        "AutoencoderKLWan",
        {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [True]},
        {"sample": (1, 3, 5, 8, 8)},
    ),
}
