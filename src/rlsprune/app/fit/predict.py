"""Predicts with the ONNX model beside this file. Needs only onnxruntime, and Pillow for images.

On the command line, run ``python predict.py photo.jpg …`` or ``python predict.py rows.csv``. In Python:

    from predict import Model
    model = Model()  # or Model("model-int8.onnx")
    model.predict(["photo.jpg"])  # or a CSV file, a list of {column: value}, or an array of inputs
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]


class Model:
    """A network and its file's description of inputs and outputs.

    Args:
        path: The ONNX file, or the name of one beside this file. None for model.onnx beside this file.

    Raises:
        FileNotFoundError: There is no such file.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        found = Path(path) if path and Path(path).is_file() else Path(__file__).parent / (path or "model.onnx")
        if not found.is_file():
            raise FileNotFoundError(f"there is no {found}: copy it beside {Path(__file__).name}")
        self.session = onnxruntime.InferenceSession(str(found), providers=["CPUExecutionProvider"])
        told = self.session.get_modelmeta().custom_metadata_map
        self.task: str = told["task"]
        """classification, regression or multi-label."""
        self.loss: str = told["loss"]
        """The loss of training. Unless it is mse, softmax turns outputs for classes into probabilities."""
        self.classes: list[str] = json.loads(told["classes"])
        """The names of the classes, labels or numbers that it predicts."""
        self.columns: list[str] = json.loads(told["columns"])
        """The names of the columns that the model takes, in their order; empty if they have none."""
        self.read: list[int] = json.loads(told["inputs_read"])
        """The features that it still reads. The others may have any value, or be missing in a row of names."""
        self.shape: list[int] = json.loads(told["input_shape"])
        """The shape of one input."""
        self.divide_by = float(told["divide_by"])
        """The divisor of the numbers before they go in: 255 for the bytes of an image."""

    def predict(self, inputs: Any) -> list[dict[str, Any]]:
        """Predicts for each input.

        Args:
            inputs: A list of image files; a CSV or TSV file with a line of names; a list of rows, {column: value};
                or an array (count, ...) of inputs like the training data (images as bytes).

        Returns:
            For each input: `label` and `probability` (only `label` after training with mse); or `labels` and
            `probabilities`; or numbers by their names.
        """
        return [self._named(row) for row in self.outputs(self._array(inputs))]

    def outputs(self, array: Any) -> Any:
        """Returns the network's raw outputs, (count, outputs)."""
        node = self.session.get_inputs()[0]
        values = (np.asarray(array, np.float32) / np.float32(self.divide_by)).astype(np.float32)
        outputs = self.session.run(None, {node.name: values.reshape(len(values), *node.shape[1:])})[0]
        return outputs.reshape(len(values), -1)

    def _array(self, inputs: Any) -> Any:
        if isinstance(inputs, str | Path):
            inputs = _rows(Path(inputs)) if _is_table(inputs) else [inputs]
        if isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], str | Path):
            return np.stack([self._pixels(Path(file)) for file in inputs])
        if isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], Mapping):
            return np.stack([self._features(row, number) for number, row in enumerate(inputs, 1)])
        array = np.asarray(inputs)
        if array.shape[1:] != tuple(self.shape):
            raise ValueError(f"inputs of shape {array.shape}: the model takes {('count', *self.shape)}")
        return array

    def _pixels(self, file: Path) -> Any:
        """Reads an image as the training images were read: upright, its middle scaled to the model's size."""
        from PIL import Image, ImageOps

        if len(self.shape) != 3 or self.shape[0] not in (1, 3):
            raise ValueError(f"{file}: the model takes inputs of shape {tuple(self.shape)}, not images")
        channels, height, width = self.shape
        with Image.open(file) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode == "I;16":  # Pillow would clip it at 255
                upright = upright.point(lambda value: value / 256).convert("L")
            upright = upright.convert("L" if channels == 1 else "RGB")
            pixels = np.asarray(ImageOps.fit(upright, (width, height)), np.uint8)
        return pixels.reshape(height, width, channels).transpose(2, 0, 1)

    def _features(self, row: Mapping[str, Any], number: int) -> Any:
        """Returns the values of a row by its names; columns that the model does not read may be missing."""
        if not self.columns:
            raise ValueError("the columns of this model have no names: give an array, as the training data were")
        values = np.zeros(len(self.columns), np.float32)
        for index in self.read:
            name = self.columns[index]
            try:
                values[index] = _number(row[name])
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"row {number} has {row.get(name)!r} in column {name!r}: give a finite number"
                ) from None
        return values

    def _named(self, row: Any) -> dict[str, Any]:
        if self.task == "regression":
            return {name: float(value) for name, value in zip(self.classes, row, strict=True)}
        if self.task == "multi-label":
            chances = {
                name: float(1 / (1 + np.exp(-value)))
                for name, value in zip(self.classes, row.astype(float), strict=True)
            }
            return {"labels": [name for name, chance in chances.items() if chance > 0.5], "probabilities": chances}
        best = int(row.argmax())
        if self.loss == "mse":
            return {"label": self.classes[best]}
        shares = np.exp(row.astype(float) - row.max())
        return {"label": self.classes[best], "probability": float(shares[best] / shares.sum())}


def _is_table(file: str | Path) -> bool:
    return Path(file).suffix.lower() in (".csv", ".tsv")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", skipinitialspace=True)
        names = [name.strip() for name in next(lines, [])]
        rows = [dict(zip(names, line, strict=False)) for line in lines if line]
    if not rows:
        raise ValueError("it has no rows: give a line of names and a line per example")
    return rows


def _number(cell: Any) -> Any:
    """Reads a cell as training does: True and False are 1 and 0."""
    value = {"true": 1, "false": 0}.get(cell.strip().lower(), cell) if isinstance(cell, str) else cell
    with np.errstate(over="ignore"):
        number = np.float32(float(value))
    if not np.isfinite(number):
        raise ValueError
    return number


def main(files: list[str]) -> int:
    """Prints a line for each image or row."""
    if not files or files[0] in ("-h", "--help"):
        (sys.stdout if files else sys.stderr).write("Usage: python predict.py IMAGE… | ROWS.csv | ROWS.tsv\n")
        return 0 if files else 2
    place = "predict.py"
    try:
        model = Model()
        for place in files:
            for number, found in enumerate(model.predict(place), 1):
                row = f":{number}" if _is_table(place) else ""
                sys.stdout.write(f"{place}{row}\t{json.dumps(found, ensure_ascii=False)}\n")
    except (OSError, ValueError, csv.Error) as error:
        problem = (isinstance(error, OSError) and error.strerror) or error
        sys.stderr.write(f"{place}: {problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
