"""Mixed precision that stays finite: loss scaling, its configuration, a trainer."""
