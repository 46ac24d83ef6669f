"""Code that runs inside Triton. `accel deploy triton` copies these modules into a repository, next to their settings in `settings.json`.

The modules import each other with relative imports. They also import the standard library, NumPy, `tokenizers` and, if Triton's Python
backend runs the graph, `onnxruntime`. They support Python 3.10. `deploy` copies `text_model`, `ensemble_step`, `graph` or `generator` as
`model.py`. Each other module contains shared code or the class of one task (`TextFront.service`), which converts texts to rows of the graph
and outputs of the graph to results.
"""
