"""Models that `draftgate pull` downloads by a short name."""
