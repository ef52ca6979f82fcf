// Puts what is new into the page as it stands, so that nobody loses his place. Without it the page
// is loaded again as a whole. Whoever has the focus keeps it.
"use strict";
(() => {
  const pause = Number(document.body.dataset.refresh) * 1000;
  const said = document.getElementById("said");
  if (!pause) return;
  const place = (element) => {
    if (element.id) return "#" + CSS.escape(element.id);
    const href = element.getAttribute("href");
    return href ? 'a[href="' + CSS.escape(href) + '"]' : "";
  };
  const parts = (page) => [...page.querySelectorAll("[data-live]")].map((part) => part.id).join();
  const renewed = (old, now) => {
    if (!now) return;
    for (const shut of now.querySelectorAll("details[id]"))
      shut.open = document.getElementById(shut.id)?.open ?? false;
    if (now.innerHTML === old.innerHTML) return;
    const focused = old.contains(document.activeElement) ? place(document.activeElement) : "";
    const before = new Set([...old.querySelectorAll("tbody tr")].map((row) => row.outerHTML));
    old.replaceChildren(...now.childNodes);
    for (const row of old.querySelectorAll("tbody tr"))
      if (!before.has(row.outerHTML)) row.classList.add("fresh");
    const again = focused && old.querySelector(focused);
    if (again) again.focus({ preventScroll: true });
  };
  const renew = async () => {
    if (document.hidden) return;
    const answer = await fetch(location.href, { signal: AbortSignal.timeout(20000) });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!page.getElementById("said")) throw new Error("this is no page of the agent");
    if (parts(page) !== parts(document)) location.reload();  // the pod came, or is gone
    for (const old of document.querySelectorAll("[data-live]"))
      renewed(old, page.getElementById(old.id));
  };
  const tell = (words) => { if (said.textContent !== words) said.textContent = words; };
  const lost = "The agent does not answer: what is shown is old.";
  const again = () => setTimeout(() => {
    renew().then(() => tell(""), () => tell(lost)).finally(again);
  }, pause);
  again();
})();
