// An option that is typed with its dashes is found: the search would take a leading dash as "without this word".
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input") && /(^|\s)-/.test(target.value)) {
    target.value = target.value.replace(/(^|\s)-+/g, "$1");
  }
}, true);
