"""What the layers of a checkpoint's folder read of a text of ours: prose, talk, code and tables, in calibration.txt.

Refuses to know what it is measured for. Importing it loads torch.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from app.progress import Progress
from app.text.folder_tokenizer import from_folder
from app.text.tokenizer import Tokenizer
from engine.checkpoints.calibration import input_squares
from engine.loading import open_checkpoint
from quant.errors import InglenookError

TEXT_FILE = Path(__file__).with_name("calibration.txt")


def measure(folder: Path, progress: Progress) -> dict[str, Tensor]:
    """What `calibration.input_squares` finds; nothing, and a line that says why, where a model cannot be run."""
    try:
        with open_checkpoint(folder) as checkpoint:
            ids = text_ids(from_folder(folder))
            with progress.task("Measuring what the layers read", len(ids), unit="tokens") as report:
                return input_squares(checkpoint, ids, report)
    except InglenookError as problem:
        progress.say(f"What the layers read was not measured, so the copy is less exact: {problem.message}.")
        return {}


def text_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """As the beginning of a document."""
    ids = tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8"))
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos and tokenizer.bos_id is not None else ids
