"""Code that runs inside Triton. `accel deploy triton` copies these modules into a repository, next to their settings in `settings.json`.

The modules import each other with relative imports. Their only other imports are the standard library, NumPy, `tokenizers` and, if Python
runs the graph, `onnxruntime`. They support Python 3.10. `text_model`, `ensemble_step`, `graph` and `generator` are copied as `model.py`.
The other modules contain a class for one task, which converts texts to rows and outputs to results (`TextFront.service`), and code that
these classes share.
"""
