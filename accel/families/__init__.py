"""Architecture families: what is particular to the models of one family, one module each, where the general way is wrong.

In: a model, and what capture made for it. Out: the same, changed for the family.
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
    "deberta": "deberta",
    "dpr": "dpr",
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
"""Module of this package by model type, transformers' word in `config.json`."""
