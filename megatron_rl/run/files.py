"""Names in the folder of a run."""

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CURVES = "curves.png"
EVALUATION = "evaluation"
REQUEUE = "requeue"  # while a run that was stopped on request waits to be resumed
