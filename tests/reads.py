"""Counts what a loader reads of a checkpoint's tensors, while it reads them."""

import collections

import safetensors


class CountedFile:
    """Opens a file like `safetensors.safe_open`; `counts` says how many elements of each tensor were read."""

    counts: collections.Counter

    def __init__(self, file, framework: str):
        self._file = safetensors.safe_open(file, framework)

    def keys(self):
        return self._file.keys()

    def get_slice(self, name: str):
        return _CountedTensor(self._file.get_slice(name), self.counts, name)


class _CountedTensor:
    def __init__(self, tensor, counts: collections.Counter, name: str):
        self._tensor, self._counts, self._name = tensor, counts, name
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index):
        part = self._tensor[index]
        self._counts[self._name] += part.size
        return part


def counted(counts: collections.Counter) -> type[CountedFile]:
    """Returns what to open files with so that `counts` fills."""
    return type("CountedFile", (CountedFile,), {"counts": counts})
