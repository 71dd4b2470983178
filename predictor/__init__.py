"""How long will the answer be: a package of its own, useful without the runtime.

`LengthPredictor` is a BERT-family encoder with a head over length buckets (S3, section 3.1), which
`train` trains; its distributions can be conditioned on tokens that have come
(`LengthDistributions`) and turned into reservations that keep a promised miss rate (`Calibration`).
"""

from predictor.buckets import LengthBuckets
from predictor.calibration import Calibration
from predictor.data import Example, read_jsonl, split, write_jsonl
from predictor.distribution import LengthDistributions
from predictor.encoder import SIZES, EncoderConfig, LengthClassifier
from predictor.evaluation import Evaluation, evaluate
from predictor.predictor import LengthPredictor
from predictor.training import History, TrainingConfig, train

__all__ = [
    "SIZES",
    "Calibration",
    "EncoderConfig",
    "Evaluation",
    "Example",
    "History",
    "LengthBuckets",
    "LengthClassifier",
    "LengthDistributions",
    "LengthPredictor",
    "TrainingConfig",
    "evaluate",
    "read_jsonl",
    "split",
    "train",
    "write_jsonl",
]
