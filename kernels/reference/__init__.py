"""Every operation in plain torch: the definition, and what runs where there is no accelerator."""
