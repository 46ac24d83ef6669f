"""Names of the graphs of models that have several and do not generate, and of the tensors between them.

A family makes these graphs, a task's model class runs them.
"""

from __future__ import annotations

# Masks for points
IMAGE_ENCODER, MASK_DECODER = "image_encoder", "mask_decoder"
EMBEDDINGS, INTERMEDIATE = "image_embeddings", "intermediate_embeddings"

# Speech made in one go
TEXT_ENCODER, WAVEFORM_DECODER = "text_encoder", "waveform_decoder"
SPEAKER, NOISE, LATENTS, FRAMES = "speaker_id", "duration_noise", "latents", "frame_mask"
