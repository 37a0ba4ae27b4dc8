"""Export networks for other runtimes. `export_model` writes and verifies one; `TARGETS` lists the formats."""

from vitral.export.exporting import Exported, export_model
from vitral.export.targets import TARGETS

__all__ = ["TARGETS", "Exported", "export_model"]
