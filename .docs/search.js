// Remove leading dashes of typed options: the search would read a dash as "without this word".
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input") && /(^|\s)-/.test(target.value)) {
    target.value = target.value.replace(/(^|\s)-+/g, "$1");
  }
}, true);
