"""Seeded tiny models of images with their processors, one or more for each task of images; see `models`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from .models import LABELS, rescale, tiny_tokenizer

_WIDTHS = [16, 16, 32, 32]
_HEADS = {"num_attention_heads": 4, "intermediate_size": 48, "hidden_size": 32}
_TEXT = {
    **_HEADS,
    "num_hidden_layers": 2,
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
_VISION = {**_HEADS, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
_DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 8,
    "num_labels": LABELS,
}


_PHRASES = 1030
"""Words of a vocabulary that has BERT's punctuation where BERT has it, which Grounding DINO looks for by number."""


def _resnet(*stages: int) -> Any:
    return transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=_WIDTHS, depths=[1, 1, 1, 1], layer_type="basic",
        out_features=[f"stage{i}" for i in stages],
    )  # fmt: skip


def _pyramid(cls: Any, **settings: Any) -> Any:
    """A config of SegFormer's kind: four stages, each half as high and wide."""
    return cls(depths=[1, 1, 1, 1], hidden_sizes=_WIDTHS, num_attention_heads=[1, 1, 2, 2], **settings)


def _clip() -> Any:
    config = transformers.CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=16)
    return transformers.CLIPModel(config)


def _siglip() -> Any:
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=_TEXT, vision_config=_VISION))


def _owl(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(text_config=_TEXT, vision_config=_VISION, projection_dim=32)
    return getattr(transformers, f"{name}ForObjectDetection")(config)


def _owlvit() -> Any:
    return _owl("OwlViT")


def _owlv2() -> Any:
    return _owl("Owlv2")


def _grounding_dino() -> Any:
    backbone = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.GroundingDinoConfig(
        backbone_config=backbone, text_config=transformers.BertConfig(**{**_TEXT, "vocab_size": _PHRASES}), d_model=32,
        encoder_layers=1, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4,
        decoder_attention_heads=4, num_queries=8, max_text_len=48,
    )  # fmt: skip
    return transformers.GroundingDinoForObjectDetection(config)


def _detr() -> Any:
    return transformers.DetrForObjectDetection(transformers.DetrConfig(backbone_config=_resnet(4), **_DETR))


def _yolos() -> Any:
    settings = {**_VISION, "image_size": [64, 64], "num_detection_tokens": 8, "num_labels": LABELS}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**settings))


def _rt_detr() -> Any:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=_WIDTHS, depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=_WIDTHS[1:], encoder_ffn_dim=48,
        encoder_attention_heads=4, d_model=32, num_queries=10, decoder_in_channels=[32] * 3, decoder_ffn_dim=48,
        decoder_attention_heads=4, decoder_layers=1, num_denoising=0, num_labels=LABELS,
    )  # fmt: skip
    return transformers.RTDetrForObjectDetection(config)


def _segformer() -> Any:
    config = _pyramid(transformers.SegformerConfig, decoder_hidden_size=32, num_labels=LABELS)
    return transformers.SegformerForSemanticSegmentation(config)


def _maskformer() -> Any:
    decoder = transformers.DetrConfig(backbone_config=_resnet(4), **_DETR)
    config = transformers.MaskFormerConfig(
        backbone_config=_resnet(1, 2, 3, 4), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32,
        num_labels=LABELS,
    )  # fmt: skip
    return transformers.MaskFormerForInstanceSegmentation(config)


def _mask2former() -> Any:
    backbone = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=48,
        dim_feedforward=48, encoder_layers=1, decoder_layers=2, num_attention_heads=4, num_queries=8, num_labels=LABELS,
    )  # fmt: skip
    return transformers.Mask2FormerForUniversalSegmentation(config)


def _sam(name: str) -> Any:
    """Three strides of 8 pixels, one layer of attention in windows and one over all of the image."""
    edges = {"image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{name}Config")(
        vision_config={
            **edges, "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 48,
            "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 16,
        },
        prompt_encoder_config={**edges, "hidden_size": 32, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 32, "mlp_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 32,
            **({"vit_dim": 32} if name == "SamHQ" else {}),
        },
    )  # fmt: skip
    return getattr(transformers, f"{name}Model")(config)


def _sam_one() -> Any:
    return _sam("Sam")


def _sam_hq() -> Any:
    return _sam("SamHQ")


def _loftr() -> Any:
    config = transformers.EfficientLoFTRConfig(
        stage_num_blocks=[1, 1, 1, 1], stage_stride=[2, 1, 2, 2], out_features=[8, 8, 16, 64], hidden_size=64,
        num_attention_layers=1, num_attention_heads=8, fine_matching_slice_dim=4, coarse_matching_threshold=0.0,
    )  # fmt: skip
    return transformers.EfficientLoFTRForKeypointMatching(config)


def _superpoint() -> Any:
    return transformers.SuperPointConfig(
        encoder_hidden_sizes=[16] * 4, decoder_hidden_size=16, descriptor_decoder_dim=16, max_keypoints=20
    )


def superglue_config() -> Any:
    """Points of a small SuperPoint, matched."""
    return transformers.SuperGlueConfig(
        keypoint_detector_config=_superpoint(), hidden_size=16, keypoint_encoder_sizes=[8, 16], gnn_layers_types=["self", "cross"],
        num_attention_heads=2, sinkhorn_iterations=5,
    )  # fmt: skip


def _superglue() -> Any:
    return transformers.SuperGlueForKeypointMatching(superglue_config())


def lightglue_config() -> Any:
    """Likewise, in three layers that may stop early."""
    return transformers.LightGlueConfig(
        keypoint_detector_config=_superpoint(), descriptor_dim=16, num_hidden_layers=3, num_attention_heads=2, filter_threshold=1e-5
    )  # fmt: skip


def _lightglue() -> Any:
    return transformers.LightGlueForKeypointMatching(lightglue_config())


def _dpt() -> Any:
    config = transformers.DPTConfig(
        **{**_VISION, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16, is_hybrid=False,
    )  # fmt: skip
    return transformers.DPTForDepthEstimation(config)


def _depth_anything() -> Any:
    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, mlp_ratio=2, image_size=28, patch_size=14,
        out_indices=[1, 2, 3, 4], reshape_hidden_states=False, apply_layernorm=True,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=14, reassemble_hidden_size=32, neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16, head_hidden_size=16,
    )  # fmt: skip
    return transformers.DepthAnythingForDepthEstimation(config)


def _glpn() -> Any:
    return transformers.GLPNForDepthEstimation(_pyramid(transformers.GLPNConfig, decoder_hidden_size=16))


def _swin2sr() -> Any:
    config = transformers.Swin2SRConfig(
        image_size=16, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, upscale=2
    )
    return transformers.Swin2SRForImageSuperResolution(config)


_SQUARE, _EDGES = {"height": 64, "width": 64}, {"shortest_edge": 64, "longest_edge": 96}
_SMALL = {"height": 32, "width": 32}
_OF_SAM = {
    "size": {"longest_edge": 32}, "pad_size": _SMALL, "mask_size": {"longest_edge": 16}, "mask_pad_size": {"height": 16, "width": 16},
}  # fmt: skip

PICTURES: Mapping[str, tuple[str, Callable[[], Any], str, Mapping[str, Any]]] = {
    "clip": (
        "zero-shot-image-classification", _clip, "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": _SMALL},
    ),
    "siglip": ("zero-shot-image-classification", _siglip, "SiglipImageProcessorPil", {"size": _SMALL}),
    "detr": ("object-detection", _detr, "DetrImageProcessorPil", {"size": _EDGES}),
    "yolos": ("object-detection", _yolos, "YolosImageProcessorPil", {"size": _EDGES}),
    "rt-detr": ("object-detection", _rt_detr, "RTDetrImageProcessorPil", {"size": _SQUARE}),
    "owlvit": ("zero-shot-object-detection", _owlvit, "OwlViTImageProcessorPil", {"size": _SMALL, "do_center_crop": False}),
    "owlv2": ("zero-shot-object-detection", _owlv2, "Owlv2ImageProcessorPil", {"size": _SMALL}),
    "grounding-dino": (
        "zero-shot-object-detection", _grounding_dino, "GroundingDinoImageProcessorPil",
        {"size": {"height": 96, "width": 96}},
    ),
    "segformer": ("image-segmentation", _segformer, "SegformerImageProcessorPil", {"size": _SQUARE}),
    "maskformer": ("image-segmentation", _maskformer, "MaskFormerImageProcessorPil", {"size": _EDGES}),
    "mask2former": ("image-segmentation", _mask2former, "Mask2FormerImageProcessorPil", {"size": _SQUARE}),
    "sam": ("mask-generation", _sam_one, "SamImageProcessorPil", _OF_SAM),
    "sam-hq": ("mask-generation", _sam_hq, "SamImageProcessorPil", _OF_SAM),
    "efficientloftr": (
        "keypoint-matching", _loftr, "EfficientLoFTRImageProcessorPil", {"size": {"height": 64, "width": 96}},
    ),
    "superglue": ("keypoint-matching", _superglue, "SuperGlueImageProcessorPil", {"size": {"height": 64, "width": 80}}),
    "lightglue": ("keypoint-matching", _lightglue, "LightGlueImageProcessorPil", {"size": {"height": 64, "width": 80}}),
    "dpt": ("depth-estimation", _dpt, "DPTImageProcessorPil", {"size": _SMALL}),
    "depth-anything": (
        "depth-estimation", _depth_anything, "DPTImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "ensure_multiple_of": 14},
    ),
    "glpn": ("depth-estimation", _glpn, "GLPNImageProcessorPil", {"size_divisor": 32}),
    "swin2sr": ("image-to-image", _swin2sr, "Swin2SRImageProcessorPil", {"size_divisor": 8}),
}  # fmt: skip
"""Task, model, and processor with its settings, by family."""

_PROCESSORS = {
    "clip": ("CLIPProcessor", ["input_ids", "attention_mask"]),
    "siglip": ("SiglipProcessor", ["input_ids"]),
    "owlvit": ("OwlViTProcessor", ["input_ids", "attention_mask"]),
    "owlv2": ("Owlv2Processor", ["input_ids", "attention_mask"]),
    "grounding-dino": ("GroundingDinoProcessor", ["input_ids", "token_type_ids", "attention_mask"]),
}
_DEFORMABLE = ("mask2former", "grounding-dino")


def tiny_picture_model(family: str, seed: int = 0) -> Any:
    """A tiny PyTorch model of a family of `PICTURES`, in evaluation mode."""
    torch.manual_seed(seed)
    model = PICTURES[family][1]()
    # Deformable attention samples at offsets that its own initialisation keeps inside the image.
    return (model if family in _DEFORMABLE else rescale(model, seed)).eval()


def tiny_processor(family: str) -> Any:
    """Its processor."""
    _, _, name, settings = PICTURES[family]
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
    """The tiny tokenizer with BERT's numbers of the tokens that end phrases."""
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
    """Write a tiny model with its processor as a transformers folder."""
    tiny_picture_model(family, seed).save_pretrained(folder)
    tiny_processor(family).save_pretrained(folder)
    return folder
