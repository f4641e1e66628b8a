"""Operations on an existing lake: change its rules, reset, redrive, keep, forget."""
