"""Serving: many callers' inputs in few calls of the model, in this process or over HTTP.

In: opened models and inputs of many callers at once. Out: the answers that the stock pipelines give, sooner. `engine` is the
public face; `model_queue` holds one model's queue and threads, `batching` decides what runs together, `operations` says what can be
asked of a model (a task describes its own: `Task.operations`), and `pipeline_work` takes a pipeline's steps apart. `http` puts an engine
behind a server: a new protocol is a module there with a table of endpoints. `ray` puts that server on a cluster, and `batch` answers
whole tables.
"""
