"""Names of graphs, and of the tensors between graphs, for models that have several graphs and do not generate text.

A model family creates these graphs, and the model class of the task runs the graphs.
"""

from __future__ import annotations

# Mask generation
IMAGE_ENCODER, MASK_DECODER = "image_encoder", "mask_decoder"
EMBEDDINGS, INTERMEDIATE = "image_embeddings", "intermediate_embeddings"

# Text to speech
TEXT_ENCODER, WAVEFORM_DECODER = "text_encoder", "waveform_decoder"
SPEAKER, NOISE, LATENTS, FRAMES = "speaker_id", "duration_noise", "latents", "frame_mask"
