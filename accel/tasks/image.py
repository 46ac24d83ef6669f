"""Tasks of models that read images, alone or beside texts."""

from __future__ import annotations

from .spec import Column, TaskSpec
from .text import LABEL

IMAGE = Column(use="image", known=("image", "img", "pixel_values", "file", "path", "image_path"), holds="image")
_CAPTION = Column(use="text", known=("text", "caption", "sentence", "prompt"), holds="text", needed="known")
_OBJECTS = Column(
    use="objects",
    known=("objects", "annotations", "annotation", "labels", "label"),
    holds="objects",
    needed="measuring",
    answer=True,
)


def _map(use: str, *known: str) -> Column:
    """A picture with a value for each pixel: what a model should answer."""
    return Column(use=use, known=known, holds="map", needed="measuring", answer=True)


SPECS = (
    TaskSpec(
        name="image-classification",
        model="accel.models.encoders:ORTModelForImageClassification",
        auto_model="AutoModelForImageClassification",
        output="ImageClassifierOutput",
        outputs={"logits": ("batch", "num_labels")},
        # Perceiver's three ways to read an image.
        suffixes=tuple(f"ForImageClassification{how}" for how in ("", "Learned", "Fourier", "ConvProcessing")),
        modalities=("image",),
        columns=(LABEL, IMAGE),
        loss="ForImageClassification",
        encode="accel.data.batches:encode_images",
        predictor="accel.measuring.accuracy.predictors:Classes",
    ),
    TaskSpec(
        name="zero-shot-image-classification",
        model="accel.models.images:ORTModelForZeroShotImageClassification",
        auto_model="AutoModelForZeroShotImageClassification",
        outputs={"logits_per_image": ("batch", "texts")},
        keeps=("logits_per_image", "logits_per_text", "image_embeds", "text_embeds"),
        suffixes=(
            "CLIPModel",
            "AlignModel",
            "BlipModel",
            "CLIPSegModel",
            "MetaClip2Model",
            "SiglipModel",
            "Siglip2Model",
        ),
        modalities=("image", "text"),
        sample="accel.capture.image_text:image_text_sample",
        columns=(LABEL, IMAGE, _CAPTION),
        encode="accel.data.pictures:encode_images_with_texts",
        predictor="accel.measuring.accuracy.pictures:Candidates",
    ),
    TaskSpec(
        name="object-detection",
        model="accel.models.images:ORTModelForObjectDetection",
        auto_model="AutoModelForObjectDetection",
        outputs={"logits": ("batch", "queries", "classes"), "pred_boxes": ("batch", "queries", "corners")},
        keeps=("logits", "pred_boxes", "order_logits", "out_masks"),
        suffixes=("ForObjectDetection",),
        modalities=("image",),
        columns=(_OBJECTS, IMAGE),
        encode="accel.data.pictures:encode_pictures",
        predictor="accel.measuring.accuracy.pictures:Detections",
    ),
    TaskSpec(
        name="zero-shot-object-detection",
        model="accel.models.images:ORTModelForZeroShotObjectDetection",
        auto_model="AutoModelForZeroShotObjectDetection",
        outputs={"logits": ("batch", "queries", "texts"), "pred_boxes": ("batch", "queries", "corners")},
        keeps=("logits", "pred_boxes", "objectness_logits"),
        suffixes=("OwlViTForObjectDetection", "Owlv2ForObjectDetection", "GroundingDinoForObjectDetection"),
        modalities=("image", "text"),
        columns=(_OBJECTS, IMAGE, _CAPTION),
        encode="accel.data.pictures:encode_images_with_each_text",
        predictor="accel.measuring.accuracy.pictures:DetectionsByName",
        sample="accel.capture.image_text:detection_sample",
    ),
    TaskSpec(
        name="image-segmentation",
        model="accel.models.images:ORTModelForImageSegmentation",
        auto_model="AutoModelForSemanticSegmentation",
        more_auto_models=(
            "AutoModelForUniversalSegmentation",
            "AutoModelForInstanceSegmentation",
            "AutoModelForImageSegmentation",
        ),
        keeps=("logits", "pred_boxes", "pred_masks", "class_queries_logits", "masks_queries_logits"),
        suffixes=(
            "ForSemanticSegmentation",
            "ForInstanceSegmentation",
            "ForUniversalSegmentation",
            "ForSegmentation",
        ),
        synonyms=("semantic-segmentation", "instance-segmentation", "universal-segmentation"),
        modalities=("image",),
        columns=(
            _map("mask", "annotation", "mask", "masks", "label", "labels", "segmentation_mask", "semantic_mask"),
            IMAGE,
        ),
        encode="accel.data.pictures:encode_pictures",
        predictor="accel.measuring.accuracy.pictures:Segments",
    ),
    TaskSpec(
        name="mask-generation",
        model="accel.models.masks:ORTModelForMaskGeneration",
        auto_model="AutoModelForMaskGeneration",
        suffixes=("SamModel", "SamHQModel"),
        modalities=("image",),
        sample="accel.capture.masks:mask_sample",
        parts="accel.capture.masks:mask_parts",
    ),
    TaskSpec(
        name="keypoint-matching",
        model="accel.models.images:ORTModelForKeypointMatching",
        auto_model="AutoModelForKeypointMatching",
        outputs={"matches": ("batch", "pair", "keypoints"), "keypoints": ("batch", "pair", "keypoints", "coordinates")},
        keeps=("matches", "matching_scores", "keypoints", "mask"),
        suffixes=("ForKeypointMatching",),
        modalities=("image",),
        sample="accel.capture.image_text:pair_sample",
        stands_in="accel.capture.keypoints:KeypointMatcher",
    ),
    TaskSpec(
        name="depth-estimation",
        model="accel.models.images:ORTModelForDepthEstimation",
        auto_model="AutoModelForDepthEstimation",
        output="DepthEstimatorOutput",
        outputs={"predicted_depth": ("batch", "height", "width")},
        keeps=("predicted_depth", "field_of_view", "domain_logits"),
        suffixes=("ForDepthEstimation",),
        modalities=("image",),
        columns=(_map("depth", "depth", "depth_map", "depths", "label"), IMAGE),
        encode="accel.data.pictures:encode_pictures",
        predictor="accel.measuring.accuracy.pictures:Depths",
    ),
    TaskSpec(
        name="image-to-image",
        model="accel.models.images:ORTModelForImageToImage",
        auto_model="AutoModelForImageToImage",
        output="ImageSuperResolutionOutput",
        outputs={"reconstruction": ("batch", "channels", "height", "width")},
        keeps=("reconstruction",),
        suffixes=("ForImageSuperResolution",),
        modalities=("image",),
        columns=(_map("target", "target", "hr", "high_resolution", "ground_truth", "gt"), IMAGE),
        encode="accel.data.pictures:encode_pictures",
        predictor="accel.measuring.accuracy.pictures:Pixels",
        own_pipelines={"image-to-image": "accel.models.pipelines.image_to_image:ImageToImagePipeline"},
    ),
)
