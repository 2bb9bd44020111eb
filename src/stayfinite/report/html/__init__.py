"""A run, or the incidents of a guard, as one page of HTML that can be mailed."""
