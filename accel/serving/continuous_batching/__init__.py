"""Generation for many callers at once: rows join and leave one running batch between its steps.

In: prompts as token ids, and how to continue each. Out: tokens as they are made. `engine` is the face, with texts; a
`scheduler` owns a model and the thread that runs it; `batch` holds the rows that are computed together and their cache;
`choosing` makes tokens of logits, with transformers' own processors; `text` turns tokens into final pieces of text. A new
setting of a request is a field of `options`.
"""
