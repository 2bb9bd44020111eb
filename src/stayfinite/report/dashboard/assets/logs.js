// A logarithmic axis for any numbers, a loss scale that fell to 1e-40 among them.

const MOST_LINES = 7;

export function logRange(plot, low, high) {
  if (low === null || high === null || low <= 0) return [0.1, 1];
  const [from, to] = [Math.floor(Math.log10(low) * 2) / 2, Math.ceil(Math.log10(high) * 2) / 2];
  return [10 ** from, 10 ** (to > from ? to : from + 0.5)];
}

export function logSplits(plot, axis, low, high) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const factors = to - from < 1.2 ? [1, 2, 3, 5, 7] : to - from < 2.5 ? [1, 2, 5] : [1];
  const each = Math.max(1, Math.ceil((to - from) / MOST_LINES));
  const found = [];
  for (let power = Math.floor(from); power <= Math.ceil(to); power += 1) {
    if (power % each) continue;
    for (const factor of factors) {
      const value = Number(`${factor}e${power}`);
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found;
}

export const keepAll = (plot, splits) => splits;
