"""Special handling of model families. Each module is for one family whose models the general code would export incorrectly.

In: a model, its config, or the sample inputs of a trace. Out: a changed model, config or sample that can be exported correctly.

Families replace or call private functions in the transformers module of their architecture, because transformers has no public
functions for this purpose. `tests/unit/test_upstream_capture.py` lists the private functions. They exist in transformers 5.23 and
5.24.
"""

MODULES = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "mbart", "mvp", "plbart"), "bart"),
    **dict.fromkeys(("mt5", "t5", "umt5"), "t5"),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"), "roberta"
    ),
    **dict.fromkeys(("flaubert", "xlm"), "xlm"),
    **dict.fromkeys(("phi3", "phi4_multimodal", "phimoe"), "phi3"),
    **dict.fromkeys(("depth_pro", "glpn", "zoedepth"), "metric_depth"),
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), "grounding_dino"),
    **dict.fromkeys(("idefics3", "smolvlm"), "idefics3"),
    **dict.fromkeys(("sam", "sam_hq"), "sam"),
    **dict.fromkeys(("siglip", "siglip2"), "siglip"),
    "bros": "bros",
    "deberta": "deberta",
    "dpr": "dpr",
    "efficientloftr": "efficientloftr",
    "focalnet": "focalnet",
    "led": "led",
    "lightglue": "lightglue",
    "longformer": "longformer",
    "moonshine": "moonshine",
    "mpnet": "mpnet",
    "opt": "opt",
    "ovis2": "ovis2",
    "perceiver": "perceiver",
    "speech_to_text": "speech_to_text",
    "superglue": "superglue",
    "visual_bert": "visual_bert",
    "vits": "vits",
    "whisper": "whisper",
    "xmod": "xmod",
}
"""Maps `model_type` of a `config.json` to the name of the family's module in this package."""
