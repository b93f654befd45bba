"""Does an installed fastserve work at all? CI runs these against the wheel, away from the checkout."""
