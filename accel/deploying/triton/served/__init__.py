"""What runs inside Triton: modules that are copied into a repository as they are, and settings beside them in `settings.json`.

They import each other by relative names alone, and besides the standard library NumPy, `tokenizers` and, where a graph runs in
Python, `onnxruntime`. Python 3.10 is enough. `front`, `tokenizer_step`, `answer_step`, `graph` and `generator` become a
`model.py`; each task that reads and answers text has a module with a class `Service`.
"""
