"""Prediction of output lengths; usable without the runtime.

`LengthPredictor` is a BERT-family encoder with a head over length buckets (S3, section 3.1), and
`train` trains it. Its distributions can be conditioned on the tokens generated so far
(`LengthDistributions`) and turned into reservations with a stated miss rate (`Calibration`).
`LengthProbe` predicts the remaining length from the served model's own activations.
`OnlineLearner` continues to train a predictor on the answers that are served.

Names are imported on first use, so that buckets, distributions and calibration work without JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predictor.buckets import LengthBuckets as LengthBuckets
    from predictor.calibration import Calibration as Calibration
    from predictor.data import Example as Example
    from predictor.data import read_jsonl as read_jsonl
    from predictor.data import split as split
    from predictor.data import split_in_three as split_in_three
    from predictor.data import write_jsonl as write_jsonl
    from predictor.distribution import LengthDistributions as LengthDistributions
    from predictor.encoder import SIZES as SIZES
    from predictor.encoder import EncoderConfig as EncoderConfig
    from predictor.encoder import LengthClassifier as LengthClassifier
    from predictor.evaluation import PROMISES as PROMISES
    from predictor.evaluation import Contender as Contender
    from predictor.evaluation import Evaluation as Evaluation
    from predictor.evaluation import compare as compare
    from predictor.evaluation import evaluate as evaluate
    from predictor.online import Counters as Counters
    from predictor.online import OnlineConfig as OnlineConfig
    from predictor.online import OnlineLearner as OnlineLearner
    from predictor.predictor import LengthPredictor as LengthPredictor
    from predictor.probe import LengthProbe as LengthProbe
    from predictor.probe import ProbeConfig as ProbeConfig
    from predictor.probe_training import Readings as Readings
    from predictor.probe_training import train_probe as train_probe
    from predictor.refinement import Refinement as Refinement
    from predictor.training import History as History
    from predictor.training import TrainingConfig as TrainingConfig
    from predictor.training import train as train

_HOMES = {
    "PROMISES": "evaluation",
    "SIZES": "encoder",
    "Calibration": "calibration",
    "Contender": "evaluation",
    "Counters": "online",
    "EncoderConfig": "encoder",
    "Evaluation": "evaluation",
    "Example": "data",
    "History": "training",
    "LengthBuckets": "buckets",
    "LengthClassifier": "encoder",
    "LengthDistributions": "distribution",
    "LengthPredictor": "predictor",
    "LengthProbe": "probe",
    "OnlineConfig": "online",
    "OnlineLearner": "online",
    "ProbeConfig": "probe",
    "Readings": "probe_training",
    "Refinement": "refinement",
    "TrainingConfig": "training",
    "compare": "evaluation",
    "evaluate": "evaluation",
    "read_jsonl": "data",
    "split": "data",
    "split_in_three": "data",
    "train": "training",
    "train_probe": "probe_training",
    "write_jsonl": "data",
}

__all__ = sorted(_HOMES)  # pyrefly: ignore[unresolvable-dunder-all]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'predictor' has no attribute {name!r}")
    value = getattr(import_module(f"predictor.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
