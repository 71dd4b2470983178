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
    from jaxserve.predictor.buckets import LengthBuckets as LengthBuckets
    from jaxserve.predictor.calibration import Calibration as Calibration
    from jaxserve.predictor.calibration import Recalibration as Recalibration
    from jaxserve.predictor.data import Example as Example
    from jaxserve.predictor.data import read_jsonl as read_jsonl
    from jaxserve.predictor.data import split as split
    from jaxserve.predictor.data import split_in_three as split_in_three
    from jaxserve.predictor.data import write_jsonl as write_jsonl
    from jaxserve.predictor.distribution import LengthDistributions as LengthDistributions
    from jaxserve.predictor.encoder import SIZES as SIZES
    from jaxserve.predictor.encoder import EncoderConfig as EncoderConfig
    from jaxserve.predictor.encoder import LengthClassifier as LengthClassifier
    from jaxserve.predictor.evaluation import PROMISES as PROMISES
    from jaxserve.predictor.evaluation import Contender as Contender
    from jaxserve.predictor.evaluation import Evaluation as Evaluation
    from jaxserve.predictor.evaluation import compare as compare
    from jaxserve.predictor.evaluation import evaluate as evaluate
    from jaxserve.predictor.online import Counters as Counters
    from jaxserve.predictor.online import OnlineConfig as OnlineConfig
    from jaxserve.predictor.online import OnlineLearner as OnlineLearner
    from jaxserve.predictor.predictor import LengthPredictor as LengthPredictor
    from jaxserve.predictor.probe import LengthProbe as LengthProbe
    from jaxserve.predictor.probe import ProbeConfig as ProbeConfig
    from jaxserve.predictor.probe_training import Readings as Readings
    from jaxserve.predictor.probe_training import train_probe as train_probe
    from jaxserve.predictor.refinement import Refinement as Refinement
    from jaxserve.predictor.training import TrainingConfig as TrainingConfig
    from jaxserve.predictor.training import TrainingHistory as TrainingHistory
    from jaxserve.predictor.training import train as train

_HOMES = {
    "PROMISES": "evaluation",
    "SIZES": "encoder",
    "Calibration": "calibration",
    "Contender": "evaluation",
    "Counters": "online",
    "EncoderConfig": "encoder",
    "Evaluation": "evaluation",
    "Example": "data",
    "TrainingHistory": "training",
    "LengthBuckets": "buckets",
    "LengthClassifier": "encoder",
    "LengthDistributions": "distribution",
    "LengthPredictor": "predictor",
    "LengthProbe": "probe",
    "OnlineConfig": "online",
    "OnlineLearner": "online",
    "ProbeConfig": "probe",
    "Readings": "probe_training",
    "Recalibration": "calibration",
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
        raise AttributeError(f"module 'jaxserve.predictor' has no attribute {name!r}")
    value = getattr(import_module(f"jaxserve.predictor.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
