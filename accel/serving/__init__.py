"""Serve models: batch the inputs of many callers into few model calls, in this process or over HTTP.

In: open models, and inputs of many concurrent callers. Out: the results that transformers' pipelines return. `engine` contains the public
class. `model_queue` contains the queue and the threads of one model. `batching` chooses the rows of a batch. `operations` describes the
kinds of requests (`Task.operations` returns those of a task). `pipeline_work` runs a pipeline in steps. `http` serves an engine over HTTP;
each protocol is a module with a table of endpoints. `ray` runs this server on a Ray cluster. `batch` runs a model on all rows of a table.
"""
