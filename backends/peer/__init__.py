"""Another Draftgate node as a worker: token ids over HTTP."""
