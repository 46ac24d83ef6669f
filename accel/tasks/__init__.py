"""What models can do: one `TaskSpec` a task, and how a model's task is inferred.

In: a task's name or synonym, or a model's config. Out: its `TaskSpec`, which says everything about the task by name: model
class, output, columns, metric, pipelines, predictor. A new task is one spec in the module of its modality.
"""
