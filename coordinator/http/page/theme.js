// The page's colours: as the system has them, light, or dark. Every page of one server has the same.

import { forgetColours, say } from "./dom.js";

const THEMES = ["auto", "light", "dark"];
const THEME = "relayline.theme";

function chosen() {
  const theme = localStorage.getItem(THEME);
  return THEMES.includes(theme) ? theme : "auto";
}

// Makes a button change the colours; `changed` is called after each change.
export function themed(button, changed = () => {}) {
  const apply = () => {
    const theme = chosen();
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    say(button, { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[theme]);
    button.setAttribute("aria-label", `Colours: ${theme}. Change`);
    forgetColours();
    changed();
  };
  button.addEventListener("click", () => {
    localStorage.setItem(THEME, THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length]);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
