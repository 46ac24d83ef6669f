"""Tiny image models with fixed seeds and processors, at least one for each image task.

The models are created from configs like the models in `accel.testing.models`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from .models import LABELS, check_family, rescale, tiny_tokenizer

_WIDTHS = [16, 16, 32, 32]
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 120,
    "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
_QUERIES = {"num_queries": 8, "num_labels": LABELS}
_PHRASES = 1030
"""Vocabulary size that includes the ids of BERT's punctuation tokens, because Grounding DINO splits phrases at these ids."""


def _texts_and_images(cls: Any, **settings: Any) -> Any:
    return cls(text_config=_TEXT, vision_config=_VISION, **settings)


def _resnet(*stages: int, cls: Any = transformers.ResNetConfig) -> Any:
    return cls(
        embedding_size=16, hidden_sizes=_WIDTHS, depths=[1, 1, 1, 1], layer_type="basic",
        out_features=[f"stage{i}" for i in stages],
    )  # fmt: skip


def _swin(*stages: int) -> Any:
    return transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=[f"stage{i}" for i in stages],
    )  # fmt: skip


def _pyramid(cls: Any, **settings: Any) -> Any:
    """Return a config like SegFormer's: four stages, each of which halves height and width."""
    return cls(depths=[1, 1, 1, 1], hidden_sizes=_WIDTHS, num_attention_heads=[1, 1, 2, 2], **settings)


def _detr() -> Any:
    return transformers.DetrConfig(
        backbone_config=_resnet(4), use_timm_backbone=False, backbone=None, **_DETR, **_QUERIES
    )


def _grounding_dino() -> Any:
    text = transformers.BertConfig(**{**_TEXT, "vocab_size": _PHRASES})
    settings = {**_DETR, "decoder_layers": 2, "num_queries": 8, "max_text_len": 48}
    return transformers.GroundingDinoConfig(backbone_config=_swin(2, 3, 4), text_config=text, **settings)


def _yolos() -> Any:
    settings = {**_VISION, "image_size": [64, 64], "num_detection_tokens": 8, "num_labels": LABELS}
    return transformers.YolosConfig(**settings)


def _rt_detr() -> Any:
    settings = {name: value for name, value in _DETR.items() if name != "encoder_layers"}
    return transformers.RTDetrConfig(
        backbone_config=_resnet(2, 3, 4, cls=transformers.RTDetrResNetConfig), encoder_hidden_dim=32,
        encoder_in_channels=_WIDTHS[1:], num_queries=10, decoder_in_channels=[32] * 3, num_denoising=0, num_labels=LABELS,
        **settings,
    )  # fmt: skip


def _segformer() -> Any:
    return _pyramid(transformers.SegformerConfig, decoder_hidden_size=32, num_labels=LABELS)


def _maskformer() -> Any:
    return transformers.MaskFormerConfig(
        backbone_config=_resnet(1, 2, 3, 4), decoder_config=_detr(), fpn_feature_size=32, mask_feature_size=32,
        num_labels=LABELS,
    )  # fmt: skip


def _mask2former() -> Any:
    return transformers.Mask2FormerConfig(
        backbone_config=_swin(1, 2, 3, 4), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=48,
        dim_feedforward=48, encoder_layers=1, decoder_layers=2, num_attention_heads=4, **_QUERIES,
    )  # fmt: skip


def _sam(cls: Any, **decoder: Any) -> Any:
    """Return a config with one layer of window attention and one layer of global attention."""
    edges = {"image_size": 32, "patch_size": 8}
    return cls(
        vision_config={
            **edges, "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 48,
            "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 16,
        },
        prompt_encoder_config={**edges, "hidden_size": 32, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 32, "mlp_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 32, **decoder
        },
    )  # fmt: skip


def _loftr() -> Any:
    return transformers.EfficientLoFTRConfig(
        stage_num_blocks=[1, 1, 1, 1], stage_stride=[2, 1, 2, 2], out_features=[8, 8, 16, 64], hidden_size=64,
        num_attention_layers=1, num_attention_heads=8, fine_matching_slice_dim=4, coarse_matching_threshold=0.0,
    )  # fmt: skip


def _superpoint() -> Any:
    return transformers.SuperPointConfig(
        encoder_hidden_sizes=[16] * 4, decoder_hidden_size=16, descriptor_decoder_dim=16, max_keypoints=20
    )


def superglue_config() -> Any:
    """Return a SuperGlue config that matches keypoints of a small SuperPoint."""
    return transformers.SuperGlueConfig(
        keypoint_detector_config=_superpoint(), hidden_size=16, keypoint_encoder_sizes=[8, 16], gnn_layers_types=["self", "cross"],
        num_attention_heads=2, sinkhorn_iterations=5,
    )  # fmt: skip


def lightglue_config() -> Any:
    """Return a LightGlue config that matches keypoints of a small SuperPoint in three layers and may stop early."""
    return transformers.LightGlueConfig(
        keypoint_detector_config=_superpoint(), descriptor_dim=16, num_hidden_layers=3, num_attention_heads=2, filter_threshold=1e-5
    )  # fmt: skip


def _dpt() -> Any:
    return transformers.DPTConfig(
        **{**_VISION, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16, is_hybrid=False,
    )  # fmt: skip


def _depth_anything() -> Any:
    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, mlp_ratio=2, image_size=28, patch_size=14,
        out_indices=[1, 2, 3, 4], reshape_hidden_states=False, apply_layernorm=True,
    )  # fmt: skip
    return transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=14, reassemble_hidden_size=32, neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16, head_hidden_size=16,
    )  # fmt: skip


def _swin2sr() -> Any:
    return transformers.Swin2SRConfig(
        image_size=16, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2
    )


_SQUARE, _EDGES = {"height": 64, "width": 64}, {"shortest_edge": 64, "longest_edge": 96}
_SMALL = {"height": 32, "width": 32}
_OF_SAM = {
    "size": {"longest_edge": 32}, "pad_size": _SMALL, "mask_size": {"longest_edge": 16}, "mask_pad_size": {"height": 16, "width": 16},
}  # fmt: skip

_MODELS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "clip": ("CLIPModel", lambda: _texts_and_images(transformers.CLIPConfig, projection_dim=16)),
    "siglip": ("SiglipModel", lambda: _texts_and_images(transformers.SiglipConfig)),
    "detr": ("DetrForObjectDetection", _detr),
    "yolos": ("YolosForObjectDetection", _yolos),
    "rt-detr": ("RTDetrForObjectDetection", _rt_detr),
    "owlvit": ("OwlViTForObjectDetection", lambda: _texts_and_images(transformers.OwlViTConfig, projection_dim=32)),
    "owlv2": ("Owlv2ForObjectDetection", lambda: _texts_and_images(transformers.Owlv2Config, projection_dim=32)),
    "grounding-dino": ("GroundingDinoForObjectDetection", _grounding_dino),
    "segformer": ("SegformerForSemanticSegmentation", _segformer),
    "maskformer": ("MaskFormerForInstanceSegmentation", _maskformer),
    "mask2former": ("Mask2FormerForUniversalSegmentation", _mask2former),
    "sam": ("SamModel", lambda: _sam(transformers.SamConfig)),
    "sam-hq": ("SamHQModel", lambda: _sam(transformers.SamHQConfig, vit_dim=32)),
    "efficientloftr": ("EfficientLoFTRForKeypointMatching", _loftr),
    "superglue": ("SuperGlueForKeypointMatching", superglue_config),
    "lightglue": ("LightGlueForKeypointMatching", lightglue_config),
    "dpt": ("DPTForDepthEstimation", _dpt),
    "depth-anything": ("DepthAnythingForDepthEstimation", _depth_anything),
    "glpn": ("GLPNForDepthEstimation", lambda: _pyramid(transformers.GLPNConfig, decoder_hidden_size=16)),
    "swin2sr": ("Swin2SRForImageSuperResolution", _swin2sr),
}
PICTURES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "clip": (
        "zero-shot-image-classification",
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": _SMALL},
    ),
    "siglip": ("zero-shot-image-classification", "SiglipImageProcessorPil", {"size": _SMALL}),
    "detr": ("object-detection", "DetrImageProcessorPil", {"size": _EDGES}),
    "yolos": ("object-detection", "YolosImageProcessorPil", {"size": _EDGES}),
    "rt-detr": ("object-detection", "RTDetrImageProcessorPil", {"size": _SQUARE}),
    "owlvit": ("zero-shot-object-detection", "OwlViTImageProcessorPil", {"size": _SMALL, "do_center_crop": False}),
    "owlv2": ("zero-shot-object-detection", "Owlv2ImageProcessorPil", {"size": _SMALL}),
    "grounding-dino": (
        "zero-shot-object-detection",
        "GroundingDinoImageProcessorPil",
        {"size": {"height": 96, "width": 96}},
    ),
    "segformer": ("image-segmentation", "SegformerImageProcessorPil", {"size": _SQUARE}),
    "maskformer": ("image-segmentation", "MaskFormerImageProcessorPil", {"size": _EDGES}),
    "mask2former": ("image-segmentation", "Mask2FormerImageProcessorPil", {"size": _SQUARE}),
    "sam": ("mask-generation", "SamImageProcessorPil", _OF_SAM),
    "sam-hq": ("mask-generation", "SamImageProcessorPil", _OF_SAM),
    "efficientloftr": ("keypoint-matching", "EfficientLoFTRImageProcessorPil", {"size": {"height": 64, "width": 96}}),
    "superglue": ("keypoint-matching", "SuperGlueImageProcessorPil", {"size": {"height": 64, "width": 80}}),
    "lightglue": ("keypoint-matching", "LightGlueImageProcessorPil", {"size": {"height": 64, "width": 80}}),
    "dpt": ("depth-estimation", "DPTImageProcessorPil", {"size": _SMALL}),
    "depth-anything": (
        "depth-estimation",
        "DPTImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "ensure_multiple_of": 14},
    ),
    "glpn": ("depth-estimation", "GLPNImageProcessorPil", {"size_divisor": 32}),
    "swin2sr": ("image-to-image", "Swin2SRImageProcessorPil", {"size_divisor": 8}),
}
"""Task, image processor class, and settings of the processor, by family name."""

_PROCESSORS = {
    "clip": ("CLIPProcessor", ["input_ids", "attention_mask"]),
    "siglip": ("SiglipProcessor", ["input_ids"]),
    "owlvit": ("OwlViTProcessor", ["input_ids", "attention_mask"]),
    "owlv2": ("Owlv2Processor", ["input_ids", "attention_mask"]),
    "grounding-dino": ("GroundingDinoProcessor", ["input_ids", "token_type_ids", "attention_mask"]),
}
_DEFORMABLE = ("mask2former", "grounding-dino")


def tiny_picture_model(family: str, seed: int = 0) -> Any:
    """Return a tiny PyTorch model of a family of `PICTURES`, in evaluation mode.

    Raises:
        ConfigError: There is no such family.
    """
    check_family(family, _MODELS)
    architecture, config = _MODELS[family]
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config())
    # Keep the default initialization of deformable attention, so that its sampling offsets stay inside the image.
    return (model if family in _DEFORMABLE else rescale(model, seed)).eval()


def tiny_processor(family: str) -> Any:
    """Return the processor of a family of `PICTURES`.

    Raises:
        ConfigError: There is no such family.
    """
    check_family(family, PICTURES)
    _, name, settings = PICTURES[family]
    images = getattr(transformers, name)(**settings)
    if family not in _PROCESSORS:
        return images
    both, names = _PROCESSORS[family]
    backend = _with_punctuation() if family == "grounding-dino" else copy.deepcopy(tiny_tokenizer().backend_tokenizer)
    tokenizer = tiny_tokenizer().__class__(
        tokenizer_object=backend, model_max_length=_TEXT["max_position_embeddings"],
        pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", eos_token="[SEP]", unk_token="[UNK]",
        model_input_names=names,
    )  # fmt: skip
    return getattr(transformers, both)(images, tokenizer)


def _with_punctuation() -> Any:
    """Return the tiny tokenizer with BERT's ids for the tokens that separate phrases: `[CLS]`, `[SEP]`, `.` and `?`."""
    from tokenizers import models, processors

    backend = copy.deepcopy(tiny_tokenizer().backend_tokenizer)
    ids = {word: number for word, number in backend.get_vocab().items() if number not in (101, 102)}
    ids |= {"[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029}
    backend.model = models.WordLevel(ids, unk_token="[UNK]")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 101), ("[SEP]", 102)]
    )
    return backend


def save_tiny_pictures(folder: Path, family: str, seed: int = 0) -> Path:
    """Save a tiny image model with its processor as a transformers folder."""
    tiny_picture_model(family, seed).save_pretrained(folder)
    tiny_processor(family).save_pretrained(folder)
    return folder
