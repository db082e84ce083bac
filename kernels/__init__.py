"""Operations on tensors: one reference in torch for each, and faster versions beside it."""
