"""Question sets as tensorflow-datasets keeps them: array_record files, written once, read at random.

TensorFlow itself is not needed. One set is one folder, FOLDER/1.0.0, with a split for each of train, dev
and test that it has.
"""

import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import tensorflow_datasets as tfds
from etils import epath

from mopd_jax.refusal import Refusal
from mopd_jax.team.episode import Question

VERSION = "1.0.0"
"""Of the layout, not of anybody's data."""


class Questions(tfds.core.GeneratorBasedBuilder):
    """Builds one set from questions that were read from files: `download_and_prepare` writes them to
    DATA_DIR/questions/NAME/1.0.0, in their order."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, name: str, splits: Mapping[str, Sequence[Question]], data_dir: epath.PathLike):
        self._splits = splits
        config = tfds.core.BuilderConfig(name=name, version=VERSION)
        super().__init__(data_dir=data_dir, config=config, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {"id": text, "question": text, "golden_answers": tfds.features.Sequence(text)}
        return tfds.core.DatasetInfo(
            builder=self,
            description="Questions with their gold answers.",
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {split: self._generate_examples(questions) for split, questions in self._splits.items()}

    def _generate_examples(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict]]:
        for number, question in enumerate(questions):
            yield (
                number,
                {"id": question.id, "question": question.text, "golden_answers": list(question.answers)},
            )


def write_set(name: str, splits: Mapping[str, Sequence[Question]], data_dir: epath.PathLike) -> epath.Path:
    """Writes the splits of one set and returns its folder, DATA_DIR/questions/NAME."""
    tfds.disable_progress_bar()
    builder = Questions(name, splits, data_dir)
    with tempfile.TemporaryDirectory() as unused, contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare(download_dir=unused)  # says that it downloads, which it does not
    return epath.Path(builder.data_dir).parent


class PreparedSet(Sequence):
    """One split of a set; a question is read from its file when it is asked for."""

    def __init__(self, folder: str, split: str):
        """Opens FOLDER/1.0.0.

        Raises:
          Refusal: no set was prepared there, or it has no such split.
        """
        if not (epath.Path(folder) / VERSION / "dataset_info.json").exists():
            raise Refusal(
                f"{folder}:{split}: found no {VERSION}/dataset_info.json in {folder}, expected a set that "
                "tools/prepare_data made, e.g. data/questions/nq:train."
            )
        builder = tfds.builder_from_directory(epath.Path(folder) / VERSION)
        if split not in builder.info.splits:
            raise Refusal(f"{folder}:{split}: the set has the splits {sorted(builder.info.splits)}.")
        self._dataset, self._split = builder.info.config_name, split
        self._records = builder.as_data_source(split=split)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Question:
        if index >= len(self):  # ends an iteration
            raise IndexError(f"question {index} of {len(self)}")
        record = self._records[index]
        return Question(
            dataset=self._dataset,
            split=self._split,
            id=record["id"].decode(),
            text=record["question"].decode(),
            answers=tuple(answer.decode() for answer in record["golden_answers"]),
        )
