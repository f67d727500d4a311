"""Turn text into rows: sources, cleaning, tokenizers, fill-in-the-middle, token stores, and the order of rows."""

from ironfn.data.dataset import Dataset, batch_at, eval_batches, prefetch, rows_at, share_at
from ironfn.data.lesson import Lesson
from ironfn.data.opening import open_dataset
from ironfn.data.preparation import Prepared, prepare

__all__ = [
    "Dataset",
    "Lesson",
    "Prepared",
    "batch_at",
    "eval_batches",
    "open_dataset",
    "prefetch",
    "prepare",
    "rows_at",
    "share_at",
]
