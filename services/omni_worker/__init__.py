"""A stage worker: one engine, its batch, its arena; `omni-worker --stage NAME`."""
