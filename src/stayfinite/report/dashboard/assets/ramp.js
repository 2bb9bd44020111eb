// Colors from little to much, even to the eye: a path through the OKLCH space.

const STOPS = {
  dark: { light: [0.24, 0.93], chroma: [0.07, 0.16], hue: [285, 95] },
  light: { light: [0.96, 0.34], chroma: [0.025, 0.15], hue: [215, 290] },
};

export function ramp(theme, size = 256) {
  const { light, chroma, hue } = STOPS[theme];
  const mix = ([from, to], part) => from + (to - from) * part;
  return Array.from({ length: size }, (_, at) => {
    const part = at / (size - 1);
    const arch = 1 - 0.5 * (2 * part - 1) ** 2;
    return rgb(mix(light, part), mix(chroma, part) * arch, mix(hue, part));
  });
}

function rgb(lightness, chroma, hue) {
  const turn = (hue * Math.PI) / 180;
  const [a, b] = [chroma * Math.cos(turn), chroma * Math.sin(turn)];
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
  ].map(encoded);
}

function encoded(value) {
  const clipped = Math.min(1, Math.max(0, value));
  const curved = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
  return Math.round(255 * curved);
}

export const isDark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
