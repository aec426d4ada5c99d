"""What did each module compute? transformers' debugger of underflow and overflow, under its old names, which
``nanlocator.transformers`` has. docs/transformers.md says what it prints."""
