"""Serve models: batch the inputs of many callers into few model calls, in this process or over HTTP.

In: open models, and inputs of many concurrent callers. Out: the results that transformers' pipelines return.

- `engine`: the public class; `model_queue`: the queue and the threads of one model; `batch_formation`: the choice of rows for a batch.
- `operations`: the kinds of requests (`Task.operations` returns the operations of a task); `text_handlers`, `tensor_handler` and
  `pipeline_handler` implement operations.
- `http`: a server for an engine; each protocol is a module with a table of endpoints. `ray`: this server on a Ray cluster.
- `batch`: run a model on all rows of a table.
"""
